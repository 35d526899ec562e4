"""Proves that a model of which layers are streamed to a GPU has the bits of the one that lies there whole.

Method: packed and plain checkpoints of tiny models, by every residency, beside the same checkpoint loaded
whole, on a GPU and here: on the emulated kernels and a device that copies late (tests/hf/streaming/device).
With one wait left out the bits differ there. Memory that does not do, missing kernels and other types are
errors with the numbers.
"""

import threading

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf import awq
from kvclient.hf.awq import linear
from kvclient.hf.streaming import (
    Admission,
    StreamingCausalLM,
    StreamingConfig,
    expected_s,
    streaming_stats,
)
from kvclient.hf.streaming.device import Cuda, DeviceMover, loading
from kvclient.hf.streaming.device.plan import Outside, device_plan, spread
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import WORKING_BYTES
from kvclient.kernels import cuda
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.streaming.device.late import Late

LAYERS, GROUP = 6, 64
PROMPT = torch.arange(5, 25)[None]
RESIDENCIES = ["full_resident", "partial_resident", "ffn_only_stream", "full_stream", "auto"]


def small(tied=False, dtype=torch.float16):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=192, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    found = {}
    for name, tied in (("awq", False), ("awq tied", True)):
        found[name] = write_checkpoint(tmp_path_factory.mktemp("packed"), small(tied).float(), GROUP)
    found["plain"] = tmp_path_factory.mktemp("plain")
    small(dtype=torch.bfloat16).save_pretrained(found["plain"])
    return found


@pytest.fixture(params=["awq", "awq tied", "plain"])
def home(request, homes):
    return homes[request.param]


@pytest.fixture
def runtime(place, device, monkeypatch):
    """What the models of a test load onto."""
    monkeypatch.setattr(cuda, "DEVICES", (device.type,))
    if device.type == "cuda":
        made = Cuda(device)
    else:
        monkeypatch.setattr(linear, "_no_kernels", lambda device: None)
        made = Late()
    monkeypatch.setattr(loading, "Cuda", lambda device: made)
    return made


def dtype_of(home):
    return torch.bfloat16 if not (home / "config.json").read_text().count("awq") else torch.float16


def opened(home, residency="full_stream", **config):
    config = StreamingConfig(residency=residency, device="cuda", **config)
    return StreamingCausalLM.from_pretrained(home, config, dtype=dtype_of(home))


def whole(home, device):
    if dtype_of(home) == torch.float16:
        model = awq.from_pretrained(home, torch.float16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.bfloat16).eval()
    return model.to(device)


@torch.no_grad()
def logits(model, device, ids=PROMPT):
    """Of a prompt, then of tokens one by one."""
    out = model(ids.to(device), use_cache=True)
    found = [out.logits]
    for token in (7, 8, 9):
        step = torch.tensor([[token]], device=device)
        out = model(step, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, 1).cpu()


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_every_residency_has_the_bits_of_the_whole_model(home, residency, runtime, device):
    wanted = logits(whole(home, device), device)
    memory = None
    if residency == "auto":  # some layers do not fit, wherever the embedding lies
        parts = [opened(home, name) for name in ("full_resident", "full_stream")]
        memory = sum(streams_of(model).plan.bytes for model in parts) // 2 + WORKING_BYTES
    model = opened(home, residency, memory=memory, keep_first_k=1, keep_last_k=2)
    for _ in range(2):
        assert torch.equal(logits(model, device), wanted)
    stats = streaming_stats(model)
    if residency == "full_resident":
        assert "loads" not in stats and expected_s(model) is None
    else:
        assert stats["loads"] >= 8 and stats["bytes"] > 0 and 0 < stats["link_share"] <= 1
        assert expected_s(model) > 0 and sum(stats["waited_s"].values()) >= 0
        assert stats["bytes_per_pass"] == streams_of(model).plan.moved > 0
    streams_of(model).close()


def test_a_streamed_weight_that_is_changed_is_an_error(home, runtime, device):
    """The next copy would have overwritten it; and taken back, all is as it was."""
    model = opened(home)
    want, norm = logits(model, device), model.model.layers[1].input_layernorm
    was, norm.weight = norm.weight, torch.nn.Parameter(torch.ones_like(norm.weight, device=device))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="weight of layer 1 was changed"):
            logits(model, device)
    norm.weight = was
    assert torch.equal(logits(model, device), want)
    streams_of(model).close()


def test_generate_is_that_of_the_whole_model(home, runtime, device):
    stock, model = whole(home, device), opened(home)
    asked = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(PROMPT).to(device)}
    assert torch.equal(stock.generate(PROMPT.to(device), **asked), model.generate(PROMPT.to(device), **asked))
    streams_of(model).close()


@pytest.mark.parametrize("rows", [65, 130])
def test_prompts_of_many_rows(home, runtime, device, rows):
    """Above 64 the words are unpacked and multiplied by torch."""
    ids = torch.randint(5, 300, (1, rows), generator=torch.Generator().manual_seed(rows))
    model = opened(home)
    assert torch.equal(logits(model, device, ids), logits(whole(home, device), device, ids))
    streams_of(model).close()


def test_a_wait_that_is_left_out_shows_in_the_bits(homes, runtime, device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("a device may be early by chance; the stand-in is not")
    wanted = logits(whole(homes["plain"], device), device)
    model = opened(homes["plain"])
    monkeypatch.setattr(DeviceMover, "taken", lambda self, slot: None)
    scheduler = streams_of(model).scheduler
    scheduler._taken = lambda slot: None
    assert not torch.equal(logits(model, device), wanted)
    streams_of(model).close()


def test_two_threads_have_the_same_bits(homes, runtime, device):
    home = homes["awq" if device.type == "cuda" else "plain"]  # the emulation has one device, and no threads
    wanted, model, found = logits(whole(home, device), device), opened(home, n_staging_slots=3), []

    def run():
        stream = torch.cuda.Stream() if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            found.append(logits(model, device))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 2 and all(torch.equal(said, wanted) for said in found)
    streams_of(model).close()


def test_outside_of_its_turn_a_layer_has_no_memory(homes, runtime, device):
    model = opened(homes["awq"])
    logits(model, device)
    layer = model.model.layers[2]
    tensors = [*layer.parameters(), *(buffer for buffer in layer.buffers())]
    assert tensors and all(tensor.is_meta for tensor in tensors)
    assert not any(weight.is_meta for weight in (model.lm_head.weight, model.model.norm.weight))
    streams_of(model).close()


def test_what_is_free_for_a_request_is_the_devices(homes, runtime, device, monkeypatch):
    model = opened(homes["awq"])
    monkeypatch.setattr(type(runtime), "free", lambda self: 1000)
    assert Admission(model).memory == 1000 + streams_of(model).plan.bytes
    streams_of(model).close()


def test_a_layer_that_fails_gives_its_slot_back(homes, runtime, device):
    home = homes["plain"]
    wanted, model = logits(whole(home, device), device), opened(home)

    def wrong(*_):
        raise RuntimeError("in the middle")

    for number in (0, 3):
        hook = model.model.layers[number].mlp.register_forward_pre_hook(wrong)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="in the middle"):
                logits(model, device)
        hook.remove()
    assert torch.equal(logits(model, device), wanted)
    assert all(slot.users == 0 for slot in streams_of(model).scheduler.slots)
    streams_of(model).close()


def test_bytes_of_the_plan_are_those_of_the_device(homes, runtime, device):
    if device.type == "cpu":
        pytest.skip("no allocator that counts")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = opened(homes["awq"], "partial_resident", keep_first_k=2, keep_last_k=1)
    held = torch.cuda.memory_allocated() - before
    plan = streams_of(model).plan.bytes
    assert held <= plan + (1 << 20), (held, plan)  # torch counts in 512 bytes; rotary tables
    streams_of(model).close()


# ---------------------------------------------------------------- the plan, and what does not do


def test_layers_that_are_streamed_lie_between_those_that_stay():
    assert spread(8, 4) == [False, True] * 4
    assert spread(5, 0) == [False] * 5 and spread(5, 5) == [True] * 5
    assert [sum(spread(64, count)) for count in range(65)] == list(range(65)) and spread(64, 1)[-1]


def test_auto_streams_as_few_layers_as_the_memory_allows():
    layers = [{"attention": 100, "ffn": 900} for _ in range(8)]
    outside, work = Outside(500, 300, 50), WORKING_BYTES + 50
    for memory, streamed in ((8800, 0), (8799, 1), (6300, 4), (2300, 8)):
        found = device_plan(StreamingConfig(memory=memory + work), layers, outside, 0)
        assert sum(map(bool, found.streamed)) == streamed and found.bytes <= memory
        assert found.moved == 1000 * streamed and found.vocabulary == (("embedding",) if streamed else ())
    with pytest.raises(InvalidArgument, match=f"needs {2300 + work} bytes of the device: 2300 for what is"):
        device_plan(StreamingConfig(memory=2299 + work), layers, outside, 0)
    assert device_plan(StreamingConfig(), layers, outside, 6300 + work).moved == 4000
    # Of two rooms for requests the first that any plan leaves; the second where none does.
    for memory, moved in ((8300, 3000), (5500, 6000), (2400, 8000)):
        rooms = WORKING_BYTES + 600, WORKING_BYTES
        found = device_plan(StreamingConfig(memory=memory + work), layers, outside, 0, rooms)
        assert found.moved == moved and found.bytes + (0 if moved == 8000 else 600) <= memory


def test_a_residency_that_does_not_fit_says_the_numbers(homes, runtime, device):
    with pytest.raises(InvalidArgument, match=r"memory=1000; full_resident needs \d+ bytes of the device"):
        opened(homes["awq"], "full_resident", memory=1000)


def test_a_host_that_cannot_hold_the_rest_says_the_numbers(homes, runtime, device, monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda: 1000)
    with pytest.raises(InvalidArgument, match=r"\d+ bytes of the model .* host's memory, which has 1000"):
        opened(homes["awq"])


def test_without_kernels_it_says_what_to_do(homes, runtime, device, monkeypatch):
    monkeypatch.setattr(type(runtime), "lacks", lambda self: "the CUDA kernels were not built")
    with pytest.raises(InvalidArgument, match=r"were not built; a packed model .* `make cuda` builds them"):
        opened(homes["awq"])
    streams_of(opened(homes["plain"])).close()


def test_the_kernels_types(homes, runtime, device):
    config = StreamingConfig(device="cuda")
    with pytest.raises(InvalidArgument, match=r"torch\.float32; the kernels compute float16 and bfloat16"):
        StreamingCausalLM.from_pretrained(homes["awq"], config)


def test_another_mover_is_refused(homes):
    config = StreamingConfig(device="cuda")
    with pytest.raises(InvalidArgument, match=r"mover=.*; a model on cuda has one of its own"):
        StreamingCausalLM.from_pretrained(homes["awq"], config, mover=DeviceMover)


def test_devices_by_name():
    with pytest.raises(InvalidArgument, match=r"device='tpu'; it must be one of cpu, cuda"):
        StreamingConfig(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidArgument, match=r"device='cuda:3'; torch .* sees no CUDA device"):
            Cuda(torch.device("cuda:3"))


def test_attached_it_publishes_and_finds_what_it_computed(homes, runtime, device, client):
    kvhf = pytest.importorskip("kvclient.hf")
    pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
    model = opened(homes["awq"])
    kv = kvhf.attach(model, client, block_tokens=8)
    ids = torch.arange(5, 45, device=device)[None]
    asked = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    asked |= {"return_dict_in_generate": True, "output_scores": True}
    with kv.bypass():
        wanted = model.generate(ids, **asked).scores[0]
    for reused in (0, 32):
        found = model.generate(ids, **asked).scores[0]
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)  # another attention, in fp16
        assert kv.last.reused_tokens >= reused and kv.last.bypassed is None
    kv.detach()
    streams_of(model).close()
