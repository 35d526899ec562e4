"""Proves that layers which the host computes beside a GPU have the bits of native/cpu's products, and the
others the GPU's, whoever was chosen. The choice: tests/hf/streaming/device/test_shares.py.

Method: packed checkpoints of tiny models, streamed with costs that send none, some or all layers of few rows
to the host, beside the model that lies on the device whole, of which the same layers' products are those of
kvclient.kernels.awq over the checkpoint's own words. On a GPU and here: on the emulated kernels and a device
that copies late (tests/hf/streaming/device). The waits of the exchange: tests/hf/streaming/device.
"""

import threading

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from safetensors.torch import load_file

from kvclient.errors import InvalidArgument
from kvclient.hf import awq
from kvclient.hf.awq import linear
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.streaming import (
    StreamingCausalLM,
    StreamingConfig,
    StreamingFailed,
    expected_s,
    streaming_stats,
)
from kvclient.hf.streaming.device import Cuda, loading, placing
from kvclient.hf.streaming.device.shares import MOST_ROWS, Shares
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import WORKING_BYTES
from kvclient.kernels import awq as kernels
from kvclient.kernels import cuda
from tests.gpu.models.test_streamed import LAYERS, PROMPT, logits, small
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.streaming.device.late import Late

NONE, SOME, ALL = 10.0, 1.6, 0.01  # seconds of a layer on the host, of which the link brings one in 1
STEPS = 3  # of logits(), of one row each


def biased():
    """With biases; groups that no device's kernel takes."""
    torch.manual_seed(4)
    config = transformers.Qwen2Config(
        vocab_size=320, hidden_size=128, intermediate_size=192, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def without_zeros(tensors):
    for name in [name for name in tensors if name.endswith(".qzeros")]:
        del tensors[name]


class Home:
    """A checkpoint, and what it is computed in."""

    def __init__(self, path, dtype, group):
        self.path, self.dtype, self.group = path, dtype, group
        self.tensors = load_file(path / "model.safetensors")

    def product(self, name, x):
        """By native/cpu, out of the checkpoint's words, as it says that they are multiplied."""
        parts = {kind: self.tensors.get(f"{name}.{kind}") for kind in ("qweight", "qzeros", "scales", "bias")}
        lie = {kind: None if part is None else part.numpy() for kind, part in parts.items() if kind != "bias"}
        bias = None if parts["bias"] is None else parts["bias"].to(self.dtype).float().numpy()
        rows = x.reshape(-1, x.shape[-1]).float().cpu().numpy()
        words = lie["qweight"], lie["qzeros"], lie["scales"], bias
        out = kernels.multiply(rows, *words, self.group, bf16=x.dtype == torch.bfloat16)
        return torch.from_numpy(out).to(x.dtype).reshape(*x.shape[:-1], -1).to(x.device)

    def whole(self, device, on_host=()):
        """The model on the device; products of few rows of these layers are native/cpu's."""
        model = awq.from_pretrained(self.path, self.dtype).to(device)
        for name, module in model.named_modules():
            if isinstance(module, AwqLinear) and int(name.split(".")[2]) in on_host:
                module.forward = self.forward(name, module)
        return model

    def forward(self, name, module):
        def forward(x):
            few = x.numel() <= MOST_ROWS * module.in_features
            return self.product(name, x) if few else AwqLinear.forward(module, x)

        return forward


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    llama = write_checkpoint(tmp_path_factory.mktemp("llama"), small().float(), 64)
    said = {"zero_point": False}
    qwen = write_checkpoint(tmp_path_factory.mktemp("qwen"), biased(), 32, said, without_zeros)
    return {"llama": Home(llama, torch.float16, 64), "qwen": Home(qwen, torch.bfloat16, 32)}


@pytest.fixture(params=["llama", "qwen"])
def home(request, homes):
    return homes[request.param]


@pytest.fixture
def runtime(place, device, monkeypatch, request):
    monkeypatch.setattr(cuda, "DEVICES", (device.type,))
    if device.type == "cuda":
        made = Cuda(device)
    else:
        # The emulation has one device and no threads, and is slow: of some products torch's are the device's.
        reason = None if "bits" in request.node.name else "kernels"
        monkeypatch.setattr(linear, "_no_kernels", lambda device: reason)
        made = Late()
    monkeypatch.setattr(loading, "Cuda", lambda device: made)
    return made


@pytest.fixture
def costs(monkeypatch):
    """Sets what is measured: seconds of a layer on the host; the link takes 1, the device 0.1."""

    def told(host_s):
        def measured(model, streams, hosts, number):
            link = streams.plan.moved / len(streams.layers)
            return Shares(link, {MOST_ROWS: 0.1}, {MOST_ROWS: host_s}, layers=LAYERS)

        monkeypatch.setattr(placing, "_measured", measured)

    return told


def opened(home, residency="full_stream", **config):
    config = StreamingConfig(residency=residency, device="cuda", host_threads=2, **config)
    return StreamingCausalLM.from_pretrained(home.path, config, dtype=home.dtype)


def on_host(model, rows=1):
    return {number for number, where in streams_of(model).placement.choice(rows).items() if where == "host"}


def all_is_given_back(model):
    streams = streams_of(model)
    assert all(slot.users == 0 for slot in streams.scheduler.slots)
    assert len(streams._hosts._exchange._free) <= 1  # of one thread
    there = [name for name, weight in model.model.layers.named_parameters() if not weight.is_meta]
    assert len(there) == 2 * len(streams.shares.able) and all("norm" in name for name in there)
    assert all(weight.is_meta for name, weight in model.named_buffers() if name.endswith("qweight"))


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("host_s", [NONE, SOME, ALL])
def test_each_layer_has_the_bits_of_who_computes_it(home, host_s, costs, runtime, device):
    costs(host_s)
    model = opened(home)
    chosen = on_host(model)
    assert len(chosen) == {NONE: 0, SOME: 2, ALL: LAYERS}[host_s]
    wanted = logits(home.whole(device, chosen), device)
    for _ in range(2):
        assert torch.equal(logits(model, device), wanted)
    stats = streaming_stats(model)
    assert stats["placement"]["computed_on_host"] == 2 * STEPS * len(chosen)
    assert stats["loads"] <= 2 * (1 + STEPS) * LAYERS - stats["placement"]["computed_on_host"] + 4
    assert {n for n, seconds in stats["placement"]["host_computed_s"].items() if seconds} == chosen
    # Half a unit of the last place of each of some fifty roundings, of numbers that are near 1.
    torch.testing.assert_close(wanted, logits(home.whole(device), device), atol=0.1, rtol=0.05)
    all_is_given_back(model)
    streams_of(model).close()


@pytest.mark.parametrize("residency", ["partial_resident", "ffn_only_stream", "auto"])
def test_in_every_residency(homes, residency, costs, runtime, device):
    home, memory = homes["llama"], None
    costs(ALL)
    if residency == "auto":
        parts = [opened(home, name) for name in ("full_resident", "full_stream")]
        memory = sum(streams_of(model).plan.bytes for model in parts) // 2 + WORKING_BYTES
    model = opened(home, residency, memory=memory, keep_first_k=1, keep_last_k=2)
    chosen = on_host(model)
    assert chosen == {n for n, parts in enumerate(streams_of(model).plan.streamed) if parts}
    reference = home.whole(device, chosen)
    if residency == "ffn_only_stream":
        for layer in reference.model.layers:
            for module in layer.self_attn.modules():
                module.__dict__.pop("forward", None)
    assert torch.equal(logits(model, device), logits(reference, device))
    streams_of(model).close()


def test_generate_and_batches(homes, costs, runtime, device):
    """Two prompts: steps of two rows."""
    home = homes["llama"]
    costs(SOME)
    model = opened(home)
    reference = home.whole(device, on_host(model, 2))
    ids = torch.arange(5, 45).reshape(2, 20).to(device)
    asked = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **asked), reference.generate(ids, **asked))
    assert streaming_stats(model)["placement"]["chosen"][2] == {"host": 2, "device": LAYERS - 2}
    streams_of(model).close()


def test_both_sides_of_a_layer_at_one_time(homes, costs, runtime, device):
    """One row on the host, twenty on the device, by two threads each."""
    home = homes["llama"]
    costs(ALL)
    model = opened(home, n_staging_slots=3)
    reference = home.whole(device, on_host(model))
    prompts = [PROMPT, PROMPT[:, :1]]
    wanted = [logits(reference, device, prompt) for prompt in prompts]
    wrong, failed = [], []

    def passes(which):
        try:
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            with torch.cuda.stream(stream):
                for _ in range(4):
                    if not torch.equal(logits(model, device, prompts[which]), wanted[which]):
                        wrong.append(which)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=passes, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong and not failed
    assert all(slot.users == 0 for slot in streams_of(model).scheduler.slots)
    streams_of(model).close()


def test_a_gradient_goes_through_what_the_host_computes(homes, costs, runtime, device):
    home, found = homes["llama"], []
    costs(ALL)
    model = opened(home)
    for each in (model, home.whole(device)):
        with torch.no_grad():
            embedded = each.get_input_embeddings()(PROMPT[:, :4].to(device))
        embedded = embedded.detach().clone().requires_grad_(True)
        each(inputs_embeds=embedded, use_cache=False).logits.float().square().mean().backward()
        found.append(embedded.grad.float().cpu())
    assert found[1].abs().max() > 0
    torch.testing.assert_close(*found, atol=0.05 * float(found[1].abs().max()), rtol=0.1)
    assert streaming_stats(model)["placement"]["computed_on_host"] == LAYERS
    streams_of(model).close()


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("where", ["multiply", "in the middle", "between tokens"])
def test_what_fails_gives_everything_back(homes, where, costs, runtime, device, monkeypatch):
    home = homes["llama"]
    costs(ALL)
    model = opened(home)
    wanted = logits(model, device)
    asked = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(PROMPT).to(device)}

    def wrong(*_, **__):
        raise RuntimeError("stop")

    for _ in range(2):
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="stop"):
            if where == "multiply":
                patched.setattr(AwqLinear, "multiply", wrong)
            if where == "in the middle":
                patched.setattr(model.model.layers[3].mlp.act_fn, "forward", wrong)
            criteria = [wrong] if where == "between tokens" else []
            model.generate(PROMPT.to(device), **asked, stopping_criteria=criteria)
        all_is_given_back(model)
    assert torch.equal(logits(model, device), wanted)
    streams_of(model).close()


def test_ctrl_c_while_the_host_computes(homes, costs, runtime, device, monkeypatch):
    """torch calls no hook behind that layer: the next call gives back what it held."""
    home = homes["llama"]
    costs(SOME)
    model = opened(home)
    wanted = logits(model, device)

    def interrupted(*_):
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(AwqLinear, "multiply", interrupted)
            logits(model, device)
    assert torch.equal(logits(model, device), wanted)
    all_is_given_back(model)
    streams_of(model).close()


def test_a_host_without_the_memory_has_fewer_layers(homes, costs, runtime, device, monkeypatch):
    home = homes["llama"]
    costs(ALL)
    words = streaming_stats(opened(home))["placement"]["host_bytes"] // LAYERS
    monkeypatch.setattr(placing, "free_memory", lambda: WORKING_BYTES + 2 * words)
    model = opened(home)
    stats = streaming_stats(model)["placement"]
    assert stats["host_has"] == len(on_host(model)) == 3 and stats["host_bytes"] == 3 * words
    assert torch.equal(logits(model, device), logits(home.whole(device, on_host(model)), device))
    streams_of(model).close()


def test_words_that_are_others_when_they_are_read_again(tmp_path, costs, runtime, device, monkeypatch):
    path = write_checkpoint(tmp_path, small().float(), 64)
    home = Home(path, torch.float16, 64)
    costs(ALL)
    measured = placing._measured

    def replaced(*asked):
        held = bytearray((path / "model.safetensors").read_bytes())
        held[-len(held) // 2 :] = bytes(len(held) // 2)
        (path / "model.safetensors").write_bytes(held)
        return measured(*asked)

    monkeypatch.setattr(placing, "_measured", replaced)
    with pytest.raises(StreamingFailed, match=r"layer \d.*qweight has other bytes than at the first read"):
        opened(home)


def test_what_the_host_cannot_compute_is_refused(homes, runtime, device, tmp_path, monkeypatch):
    small(dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = StreamingConfig(residency="full_stream", device="cuda", host_threads=2)
    with pytest.raises(InvalidArgument, match=r"host_threads=2; .* and no streamed layer is packed"):
        StreamingCausalLM.from_pretrained(tmp_path, config, dtype=torch.bfloat16)
    monkeypatch.setattr(placing, "cpu_kernels", lambda: False)
    with pytest.raises(InvalidArgument, match=r"host_threads=2; .* kernels do not run here"):
        opened(homes["llama"])


def test_torch_computes_where_it_is_asked_to(homes, costs, runtime, device, monkeypatch):
    home = homes["llama"]
    costs(ALL)
    model = opened(home)
    monkeypatch.setattr(AwqLinear, "multiply", None)
    monkeypatch.setenv("KVCLIENT_BACKEND", "torch")
    wanted = logits(home.whole(device), device)
    torch.testing.assert_close(logits(model, device), wanted, atol=0.1, rtol=0.05)
    streams_of(model).close()


# ---------------------------------------------------------------- what is said


def test_it_is_measured_at_start_and_said(home, runtime, device):
    model = opened(home)
    stats = streaming_stats(model)
    said = stats["placement"]
    assert said["link_bytes_per_s"] > 0 and set(said["host_s"]) == set(said["device_s"]) == {1, 4, 16}
    assert all(seconds > 0 for table in ("host_s", "device_s") for seconds in said[table].values())
    assert sum(said["chosen"][1].values()) == LAYERS and said["host_has"] >= said["chosen"][1].get("host", 0)
    assert stats["loads"] == stats["bytes"] == 0 and not stats["computed_s"]  # of what was measured
    assert expected_s(model) > 0
    assert torch.equal(logits(model, device), logits(home.whole(device, on_host(model)), device))
    streams_of(model).close()


def test_attached_it_finds_what_a_model_without_has_published(homes, costs, runtime, device, client):
    """The identity is that of the weights: whose kernels multiplied them is not in it."""
    kvhf = pytest.importorskip("kvclient.hf")
    pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
    home = homes["llama"]
    costs(ALL)
    ids = torch.arange(5, 45, device=device)[None]
    asked = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    asked |= {"return_dict_in_generate": True, "output_scores": True}
    found = []
    for host_threads in (None, 2):
        config = StreamingConfig(residency="full_stream", device="cuda", host_threads=host_threads)
        model = StreamingCausalLM.from_pretrained(home.path, config, dtype=home.dtype)
        kv = kvhf.attach(model, client, block_tokens=8)
        found.append(model.generate(ids, **asked).scores[0])
        assert kv.last.bypassed is None
        kv.detach()
        streams_of(model).close()
    assert kv.last.reused_tokens >= 32 and streaming_stats(model)["placement"]["computed_on_host"] > 0
    torch.testing.assert_close(*found, atol=0.1, rtol=0.05)
