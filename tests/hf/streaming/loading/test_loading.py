"""Proves that a model is handed out while what stays of it is still coming: a pass begins before all is
there, whoever looks at all weights finds them, a read that fails then is read anew, and nothing goes on
reading for a model that was closed or never made.

Method: a tiny llama, packed and plain; a mover whose reads of what stays end when the test says so.
"""

import os
import threading
import weakref

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import Closed, InvalidArgument
from kvclient.hf.streaming import (
    Admission,
    DiskMover,
    StreamingCausalLM,
    StreamingConfig,
    StreamingFailed,
    frame,
    residency,
    streaming_stats,
)
from kvclient.hf.streaming.files.headers import Source
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import PARTS, WORKING_BYTES, plan

PROMPT = torch.arange(1, 25)[None]
STAYS, LAYERS = 3, 5  # those from it on stay
PARTLY = StreamingConfig(residency="partial_resident", keep_first_k=0, keep_last_k=2)


class Waits(DiskMover):
    """What stays is read when it may be."""

    def __init__(self, arranged, faults=""):
        super().__init__(*arranged.paths, faults=faults)
        self.may, self.reads, self.failing = threading.Event(), threading.Event(), 0

    def fill(self, layer, pieces, slot):
        if STAYS <= layer < LAYERS:
            self.reads.set()
            assert self.may.wait(60), f"layer {layer} was waited for"
            if self.failing:
                self.failing -= 1
                raise StreamingFailed(self.path, layer, pieces[0].offset, "no")
        super().fill(layer, pieces, slot)


def opened(checkpoint, config=PARTLY, **more):
    movers = []
    model = StreamingCausalLM.from_pretrained(
        checkpoint, config, mover=lambda files: movers.append(Waits(files)) or movers[0], **more
    )
    return model, movers[0]


@torch.inference_mode()
def logits(model):
    return model(PROMPT).logits


@pytest.fixture
def want(checkpoint):
    return logits(StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_resident")))


def test_a_pass_begins_before_all_that_stays_is_there(checkpoint, want):
    model, mover = opened(checkpoint)
    model.model.layers[STAYS - 1].register_forward_hook(lambda *_: mover.may.set())
    for _ in range(3):
        assert torch.equal(logits(model), want)
    bytes_once = sum(tensor.nbytes for tensor in model.model.layers[STAYS].state_dict().values())
    assert 0 < bytes_once < streaming_stats(model)["bytes"]
    assert not any(tensor.is_meta for tensor in model.model.layers[STAYS].state_dict().values())
    streams_of(model).close()


def test_two_threads_begin_with_what_is_still_coming(checkpoint, want):
    model, mover = opened(checkpoint)
    found = []
    threads = [threading.Thread(target=lambda: found.append(logits(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    mover.may.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and all(torch.equal(each, want) for each in found)
    streams_of(model).close()


def test_whoever_looks_at_all_weights_finds_what_stays(checkpoint):
    model, mover = opened(checkpoint)
    weights = model.model.layers[STAYS].state_dict
    assert any(tensor.is_meta for tensor in model.model.layers[STAYS].parameters())
    mover.may.set()
    assert not any(tensor.is_meta for tensor in weights().values())
    streams_of(model).close()
    model, mover = opened(checkpoint)
    mover.may.set()
    store = kvclient.InMemoryClient(32 << 20)
    with store as client, kvclient.hf.attach(model, client, block_tokens=16) as kv:
        assert not any(tensor.is_meta for tensor in model.model.layers[STAYS].parameters())
        for reused in (0, 16):
            model.generate(PROMPT, max_new_tokens=2, do_sample=False, pad_token_id=0)
            assert (kv.last.bypassed, kv.last.reused_tokens) == (None, reused)
    streams_of(model).close()


@pytest.mark.parametrize("name", ["mlp", "mlp.down_proj", "input_layernorm"])
@torch.inference_mode()
def test_a_part_that_is_called_by_itself_is_never_computed_without_its_weights(checkpoint, name):
    """torch multiplies by a weight without memory what lies in its answer's."""
    whole = StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_resident"))
    model, mover = opened(checkpoint)
    stays, streamed = (model.model.layers[number].get_submodule(name) for number in (STAYS, 0))
    x = torch.randn(1, 3, 64 if name != "mlp.down_proj" else stays.in_features, dtype=model.dtype)
    held = list(stays.parameters())
    mover.may.set()
    assert torch.equal(stays(x), whole.model.layers[STAYS].get_submodule(name)(x))
    if held:
        with pytest.raises(InvalidArgument, match="call the layer"):  # who took it before it came
            held[0] + torch.zeros(())
    logits(model)  # no layer is in memory behind it
    with pytest.raises(InvalidArgument, match="call the layer"):
        streamed(x)
    assert not any(tensor.is_meta for tensor in stays.state_dict().values())
    streams_of(model).close()


def test_a_parts_state_is_there_when_it_is_asked_for(checkpoint):
    model, mover = opened(checkpoint)
    mover.may.set()
    assert not any(tensor.is_meta for tensor in model.model.layers[STAYS].mlp.state_dict().values())
    streams_of(model).close()


def test_what_is_free_is_asked_when_what_stays_is_there(checkpoint, monkeypatch):
    """Else it would be counted twice: as held, and as free until it is."""
    model, mover = opened(checkpoint)
    mover.may.set()

    def free():
        return 0 if any(tensor.is_meta for tensor in model.model.layers[STAYS].parameters()) else 1 << 30

    monkeypatch.setattr("kvclient.hf.streaming.planner.admission.free_memory", free)
    assert Admission(model).memory == (1 << 30) + streaming_stats(model)["bytes_held"]
    streams_of(model).close()


@pytest.fixture
def free(monkeypatch):
    """Bytes free on this machine, of which no other test's model takes any; free["now"] changes them."""
    now = {"now": 1 << 30}
    monkeypatch.setattr(residency, "_takers", weakref.WeakSet())
    monkeypatch.setattr(residency, "_free", lambda: now["now"])
    return now


def test_what_is_still_coming_is_not_free_for_the_next_model(checkpoint, free):
    """Each planned with the same memory: of the first one nothing was taken yet."""
    model, mover = opened(checkpoint)
    model.get_input_embeddings()(PROMPT)  # the table is there, and so are the first two layers
    for number in range(2):
        with streams_of(model).scheduler.holding(number, passing=False):
            pass
    coming = sum(tensor.nbytes for layer in model.model.layers[STAYS:] for tensor in layer.parameters())
    coming += sum(tensor.nbytes for layer in model.model.layers[STAYS:] for tensor in layer.buffers())
    left = free["now"] - residency.free_memory()
    assert coming <= left <= streaming_stats(model)["bytes_held"]
    whole = StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_resident"))
    head = model.get_output_embeddings().weight.nbytes  # which comes behind the layers
    free["now"] = streaming_stats(whole)["bytes_held"] + WORKING_BYTES + head
    second = StreamingCausalLM.from_pretrained(checkpoint)
    assert any(streams_of(second).plan.streamed)
    streams_of(second).close()
    mover.may.set()
    logits(model)
    assert residency.free_memory() == free["now"]  # all of the first is taken
    free["now"] -= head
    second = StreamingCausalLM.from_pretrained(checkpoint)
    assert not any(streams_of(second).plan.streamed)
    streams_of(model).close()


def test_one_threads_copies_are_all_that_is_withheld(checkpoint, free):
    """Room for two threads' stayed promised for ever, though one alone called the model."""
    whole = StreamingConfig(residency="full_stream")
    model = StreamingCausalLM.from_pretrained(checkpoint, whole, dtype=torch.bfloat16)
    logits(model)
    assert residency.free_memory() == free["now"]
    streams_of(model).close()


def test_a_model_that_is_being_loaded_takes_what_it_was_promised(checkpoint, free):
    seen = []

    def told(*_):
        seen.append(residency.free_memory())
        if len(seen) > 1:
            raise InvalidArgument("enough")

    with pytest.raises(InvalidArgument, match="enough") as kept:
        StreamingCausalLM.from_pretrained(checkpoint, PARTLY, loading=told)
    assert kept and max(seen) < free["now"] == residency.free_memory()  # also while the error is looked at


def test_what_comes_in_a_call_under_inference_mode_is_as_if_it_had_come_before(checkpoint):
    """Else whoever watches for writes would not see them: such tensors count none."""
    model, mover = opened(checkpoint)
    mover.may.set()
    logits(model)
    held = [tensor for layer in model.model.layers[STAYS:] for tensor in layer.state_dict().values()]
    assert not any(tensor.is_inference() for tensor in held)
    streams_of(model).close()


def test_what_failed_to_come_is_read_anew_by_the_next_call(checkpoint, want):
    model, mover = opened(checkpoint)
    mover.failing = 8  # twice as each of two is read ahead, and twice as it is asked for
    mover.may.set()
    seen = 0
    while True:
        try:
            found = logits(model)
        except StreamingFailed as error:
            assert error.layer >= STAYS
            seen += 1
        else:
            break
    assert seen and torch.equal(found, want) and torch.equal(logits(model), want)
    streams_of(model).close()


def loading():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvclient-loading")]


def test_a_model_that_is_closed_reads_no_more(checkpoint):
    model, mover = opened(checkpoint)

    def asks():
        with pytest.raises(Closed):
            streams_of(model).settle()

    asking = threading.Thread(target=asks)
    asking.start()
    assert mover.reads.wait(60) and loading()
    closing = threading.Thread(target=streams_of(model).close)
    closing.start()
    mover.may.set()
    closing.join(60)
    asking.join(60)
    assert not closing.is_alive() and not asking.is_alive() and not loading()
    with pytest.raises(Closed):
        logits(model)


def test_who_is_told_how_far_loading_is_gets_it_whole(checkpoint, want):
    told = []
    config = StreamingConfig(residency="partial_resident", keep_first_k=0, keep_last_k=2)
    model = StreamingCausalLM.from_pretrained(checkpoint, config, loading=lambda *now: told.append(now))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 0
    assert not any(tensor.is_meta for tensor in model.model.layers[STAYS].parameters())
    assert torch.equal(logits(model), want)
    streams_of(model).close()


@pytest.mark.parametrize("call", [0, 2])
def test_a_callback_that_raises_leaves_no_file_open(checkpoint, call):
    def told(*_):
        seen.append(1)
        if len(seen) > call:
            raise InvalidArgument("enough")

    for config in (PARTLY, StreamingConfig(residency="full_resident")):
        seen = []
        with pytest.raises(InvalidArgument, match="enough"):
            StreamingCausalLM.from_pretrained(checkpoint, config, loading=told)
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert not [path for path in files if path.startswith(str(checkpoint))] and not loading()


def test_auto_spreads_what_stays():
    layers = [dict.fromkeys(PARTS, 1 << 20)] * 12
    found = plan(StreamingConfig(memory=(256 + 4 + 6) << 20), layers, 0)
    assert [number for number, parts in enumerate(found.streamed) if not parts] == [3, 7, 11]
    assert (found.bytes, found.moved) == (10 << 20, 18 << 20)


def reading() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvclient-streaming")}


def test_what_fails_behind_the_weights_ends_the_reading_too(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text("{")
    before = reading()
    with pytest.raises((OSError, ValueError)):
        StreamingCausalLM.from_pretrained(tmp_path, PARTLY)
    assert not reading() - before


@pytest.mark.parametrize("piece", [1, 7, 24, 1000])
def test_a_tensor_that_is_read_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(frame, "PIECE_BYTES", piece)
    want = torch.arange(60, dtype=torch.int32).view(5, 12)
    (tmp_path / "file").write_bytes(b"head" + want.numpy().tobytes())
    source = Source("a", tmp_path / "file", "int32", (5, 12), 4, 240)
    assert torch.equal(frame.read(source), want)
    (tmp_path / "file").write_bytes(b"head" + want.numpy().tobytes()[:-1])
    with pytest.raises(InvalidArgument, match="ends inside of a"):
        frame.read(source)
