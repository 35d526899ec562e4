"""Proves that a model whose layers are read from disk computes what the model in memory does.

Method: a tiny llama, packed (AWQ) and plain, under each residency, bit for bit against the model in memory;
layers that raise; two threads; the scheduler alone with a mover that tells what
it filled; the command on SmolLM2. Real files, real reads.
"""

import json
import re
import resource
import shutil
import sys
import threading

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import Closed, InvalidArgument
from kvclient.hf import awq
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, StreamingFailed, frame, streaming_stats
from kvclient.hf.streaming.mover import DiskMover, Piece, host_memory
from kvclient.hf.streaming.progress import Step
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.scheduler import Scheduler
from tests.warm_python import run as run_warm

RESIDENCIES = {
    "full_resident": {},
    "partial_resident": {"keep_first_k": 1, "keep_last_k": 1},
    "ffn_only_stream": {},
    "full_stream": {"n_staging_slots": 3},
    "auto": {"memory": 1 << 30},
}
PROMPT = torch.arange(1, 25)[None]


def opened(checkpoint, residency, **more):
    config = StreamingConfig(residency=residency, **{**RESIDENCIES.get(residency, {}), **more})
    return StreamingCausalLM.from_pretrained(checkpoint, config)


def logits(model):
    with torch.inference_mode():
        return model(PROMPT).logits


def answer(model, **options):
    return model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("mover", [None, host_memory])
def test_every_residency_has_the_same_bits(checkpoint, mover):
    """By either mover: from the disk, and out of the host's memory."""
    packed = "quantization_config" in json.loads((checkpoint / "config.json").read_text())
    stock = (
        awq.from_pretrained(checkpoint)
        if packed
        else transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    )
    want, said = logits(stock), answer(stock)
    for residency in RESIDENCIES:
        config = StreamingConfig(residency=residency, **RESIDENCIES[residency])
        model = StreamingCausalLM.from_pretrained(checkpoint, config, mover=mover)
        assert torch.equal(logits(model), want), residency
        assert torch.equal(answer(model), said), residency
        moved = streaming_stats(model)["bytes_per_pass"]
        assert (moved == 0) == (residency in ("full_resident", "auto"))
        streams_of(model).close()


def test_loading_is_told_of_what_stays_in_memory(checkpoint):
    ends = {}
    for residency in ("full_resident", "ffn_only_stream", "full_stream"):
        told = []
        config = StreamingConfig(residency=residency)
        model = StreamingCausalLM.from_pretrained(
            checkpoint, config, loading=lambda *now, told=told: told.append(now)
        )
        assert [done for done, _ in told] == sorted({done for done, _ in told})
        assert {whole for _, whole in told} == {told[-1][0]}
        ends[residency], moved = told[-1][0], streaming_stats(model)["bytes_per_pass"]
        streams_of(model).close()
    assert ends["full_resident"] > ends["ffn_only_stream"] > ends["full_stream"] > 0
    assert ends["full_resident"] - ends["full_stream"] == moved


def test_what_stays_in_memory_is_read_while_the_model_is_put_together(checkpoint, monkeypatch):
    begun, pack = threading.Event(), frame.pack

    class Told(DiskMover):
        def fill(self, *asked):
            begun.set()
            super().fill(*asked)

    def packed(*asked):
        assert begun.wait(60)
        pack(*asked)

    monkeypatch.setattr(frame, "pack", packed)
    config = StreamingConfig(residency="full_resident")
    model = StreamingCausalLM.from_pretrained(checkpoint, config, mover=lambda files: Told(*files.paths))
    assert torch.equal(logits(model), logits(opened(checkpoint, "full_stream")))


def test_where_loading_fails_nothing_goes_on_reading(checkpoint, monkeypatch):
    movers = []

    def broken(*_asked):
        raise InvalidArgument("no place for it")

    def mover(files):
        movers.append(DiskMover(*files.paths))
        return movers[-1]

    monkeypatch.setattr(frame, "pack", broken)
    with pytest.raises(InvalidArgument, match="no place"):
        StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_resident"), mover=mover)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvclient-loading")]
    with pytest.raises(Closed):
        movers[0].fill(0, [Piece(0, 4096, None)], memoryview(bytearray(4096)))


def test_an_answer_reads_each_layer_once_a_pass(checkpoint):
    model = opened(checkpoint, "full_stream", n_staging_slots=2)
    streams_of(model).settle()  # else the head comes through slots, too, once
    answer(model)
    stats = streaming_stats(model)
    # Fewer where the reading thread was late and a slot still held a layer of the pass before.
    assert 12 * 5 // 2 <= stats["loads"] <= 12 * 5 + 2
    assert stats["bytes"] == stats["loads"] * stats["bytes_per_pass"] // 5
    streams_of(model).close()


def test_outside_of_its_turn_a_layer_has_no_weights(checkpoint):
    model = opened(checkpoint, "full_stream")
    logits(model)
    assert all(value.is_meta for value in model.model.layers.state_dict().values())
    streams_of(model).close()


def test_a_layer_that_raises_gives_its_slot_back(checkpoint):
    model = opened(checkpoint, "full_stream")
    want, broken = logits(model), model.model.layers[2].mlp
    for _ in range(4):  # more often than there are slots

        def fails(_module, _args):
            raise RuntimeError("in the middle")

        handle = broken.register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="in the middle"):
            logits(model)
        handle.remove()
    assert torch.equal(logits(model), want)
    streams_of(model).close()


def test_two_threads_share_the_slots(checkpoint):
    model = opened(checkpoint, "full_stream")
    want, got = logits(model), []
    threads = [threading.Thread(target=lambda: got.extend(logits(model) for _ in range(5))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 10 and all(torch.equal(found, want) for found in got)
    streams_of(model).close()


def test_a_file_that_was_not_finished_is_written_anew(checkpoint):
    want = logits(opened(checkpoint, "full_resident"))
    index = checkpoint / "kvstored-streaming.json"
    index.unlink()
    (checkpoint / "kvstored-streaming.bin.part").write_bytes(b"half")
    written = []

    def told(done, total):
        written.append((done, total))

    model = StreamingCausalLM.from_pretrained(checkpoint, progress=told)
    assert written == sorted(written) and written[-1][0] == written[-1][1] and len(written) >= 10
    assert torch.equal(logits(model), want)
    index.write_text(index.read_text().replace('"piece": [0', '"piece": [1'))
    assert torch.equal(logits(opened(checkpoint, "full_resident")), want)
    assert not list(checkpoint.glob("*.part")) and not list(checkpoint.glob("*.journal"))


def test_a_file_that_may_not_grow_is_an_error_that_names_the_layer(checkpoint, tmp_path):
    """As on a full disk, a write takes only a part of what it is given, the last layer's too."""
    streams_of(opened(checkpoint, "full_stream")).close()
    last = json.loads((checkpoint / "kvstored-streaming.json").read_text())["layers"][4]["ffn"]["piece"]
    most = last[0] + last[1] - 100
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))  # Python ignores the signal
    try:
        with pytest.raises(StreamingFailed, match=r"\.bin\.part, layer 4, offset \d+: File too large"):
            opened(tmp_path, "full_stream")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(logits(opened(tmp_path, "full_resident")), logits(opened(checkpoint, "full_resident")))


def test_too_little_memory_is_said_with_the_numbers(checkpoint):
    with pytest.raises(
        InvalidArgument, match=r"memory=268436456; with every layer streamed the model needs \d+ bytes"
    ):
        opened(checkpoint, "auto", memory=(256 << 20) + 1000)


class Telling:
    """Fills slots with the layer's number, and tells."""

    def __init__(self):
        self.filled = []

    def fill(self, layer, pieces, slot):
        slot[:1] = bytes([layer])
        self.filled.append(layer)

    def close(self):
        pass


def test_a_slot_is_filled_only_when_nobody_computes_from_it():
    scheduler = Scheduler(Telling(), {n: (Piece(0, 4096, 0),) for n in range(6)}, slots=2, ahead=1)
    try:
        with scheduler.holding(0) as first, scheduler.holding(1) as second:
            got = []
            third = threading.Thread(target=lambda: got.append(_held(scheduler, 4)))
            third.start()
            third.join(0.2)  # it must wait: both slots are being computed from
            assert not got and (first.memory[0], second.memory[0]) == (0, 1)
        third.join(30)
        assert got == [4]
    finally:
        scheduler.close()


def _held(scheduler, layer):
    with scheduler.holding(layer) as slot:
        return slot.memory[0]


def test_the_command_prints_the_answer_and_the_ceiling(model_dir, tmp_path):
    for file in model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)  # what is rearranged lies beside these
    command = [sys.executable, "-m", "kvclient.hf.streaming"]
    asked = ["--residency", "full_stream", "--max-new-tokens", "4", "--json"]
    asked += ["--trace", str(tmp_path / "trace.json")]
    done = run_warm([*command, str(tmp_path), *asked], timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == 4 and "Paris" in found["text"] and found["ceiling_tokens_per_s"] > 0
    assert found["expected_tokens_per_s"] > 0
    assert 0 < found["stats"]["link_share"] <= 1 and sum(found["stats"]["computed_s"].values()) > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    lines = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert {"compute", "wait", "read 0"} <= set(lines)
    assert all(span["dur"] >= 0 and span["ts"] >= 0 and span["tid"] in lines.values() for span in spans)
    computed = [span for span in spans if span["tid"] == lines["compute"]]
    assert len(computed) == 4 * len(found["stats"]["computed_s"])  # four passes


def test_a_step_of_loading_says_how_far_it_is(capsys):
    step = Step("loading")
    for done in (1, 2, 3):
        step(done << 20, 3 << 20)
    said = capsys.readouterr().err
    assert said.startswith("\rloading: 1 of 3 MiB\rloading: 2 of 3 MiB, ")
    assert "MiB/s, " in said and said.endswith(" 0 s left \n")
    step = Step("loading")
    for done in (0, 1):
        step(done, 1 << 30)
    assert "left" not in capsys.readouterr().err  # hours


def test_the_command_names_a_directory_that_is_none():
    command = [sys.executable, "-m", "kvclient.hf.streaming", "/nowhere", "--json"]
    done = run_warm(command, timeout=300)
    assert done.returncode == 1 and "no directory with a config.json" in json.loads(done.stderr)["error"]


@pytest.mark.parametrize("residency", ["full_stream", "partial_resident", "ffn_only_stream"])
@pytest.mark.parametrize("first", ["streamed", "resident"])
def test_streamed_and_resident_find_what_the_other_published(checkpoint, residency, first):
    """One identity: the same weights, wherever they lie; each answers as it does without the store."""
    streamed = opened(checkpoint, residency)
    if (checkpoint / "config.json").read_text().find("quantization_config") >= 0:
        resident = awq.from_pretrained(checkpoint)
    else:
        resident = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    models = [streamed, resident] if first == "streamed" else [resident, streamed]
    ids = PROMPT.repeat(1, 3)
    with kvclient.InMemoryClient(32 << 20) as client:
        identities, answers = [], []
        for model in models:
            plain = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            with kvclient.hf.attach(model, client, block_tokens=16) as kv:
                reused = []
                for _ in range(2):
                    answers.append(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))
                    assert kv.last.bypassed is None
                    reused.append(kv.last.reused_tokens)
                identities.append(kv.identity)
                assert reused == ([0, 64] if model is models[0] else [64, 64])
            assert all(torch.equal(plain, answer) for answer in answers)
        assert identities[0] == identities[1]
    streams_of(streamed).close()


def test_a_resident_weight_of_a_streamed_layer_is_part_of_the_identity(checkpoint):
    """The digest that is kept is that of streamed weights alone: an edit of another misses the old KV."""
    model, ids = opened(checkpoint, "ffn_only_stream"), PROMPT.repeat(1, 3)

    def answer():
        return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    with (
        kvclient.InMemoryClient(32 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        answer(), answer()
        assert kv.last.reused_tokens == 64
        before, attention = kv.identity, model.model.layers[2].self_attn.v_proj
        with torch.no_grad():
            (attention.scales if hasattr(attention, "scales") else attention.weight).mul_(0.5)
        edited = answer()
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0) and kv.identity != before
        with kv.bypass():
            assert torch.equal(answer(), edited)
    streams_of(model).close()


def test_a_layer_that_cannot_be_given_its_weights_gives_its_slot_back(checkpoint, monkeypatch):
    model = opened(checkpoint, "full_stream")
    want, streams = logits(model), streams_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(streams, "_point", lambda *_: 1 / 0)
        for _ in range(4):  # more often than there are slots
            with pytest.raises(ZeroDivisionError):
                logits(model)
    assert torch.equal(logits(model), want)
    streams.close()


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ('{"weight_map": {"a": "gone.safetensors"}}', "'gone.safetensors'"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "'../model.safetensors'"),
        ("[]", "no weight_map"),
        ("{", "no weight_map"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused_by_name(checkpoint, tmp_path, said, wrong):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    shutil.copy(copy / "model.safetensors", tmp_path)  # what a path out of the directory would find
    (copy / "model.safetensors.index.json").write_text(said)
    with pytest.raises(InvalidArgument, match=re.escape(wrong)):
        StreamingCausalLM.from_pretrained(copy)


def test_scales_that_are_no_numbers_and_files_of_others_are_not_read(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in checkpoint.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({"other.layers.0.weight": torch.zeros(3)}, tmp_path / "adapter.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    streams_of(StreamingCausalLM.from_pretrained(tmp_path)).close()
    if not (scales := [name for name in tensors if name.endswith(".scales")]):
        return
    tensors[scales[0]][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=f"{scales[0]} has nan; all must be finite"):
        StreamingCausalLM.from_pretrained(tmp_path)
