"""Proves that a model on a GPU attends to the store's blocks in device memory, as they lie, and says what
plain generation says.

Method: tiny random models against generate() without a store, cold and warm, alone and in padded rows, with
quantised blocks against the same attention over their dense form. On the emulation the layers, the staging
and the transfer are the same, over host memory; so what first meets a GPU has run before. That nothing was
built dense is seen in memory.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")

import kvclient.hf
from kvclient.blocks.codec import Kivi
from kvclient.hf import attention
from kvclient.hf.cache import staging
from kvclient.hf.cache.device import DeviceLayer
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.reuse import blend
from kvclient.kernels import contract, cuda
from kvclient.kernels.host_memory import HostMemory
from tests.gpu.models.bound import bound, model_on
from tests.gpu.oracle import noise
from tests.hf.zoo import generate, near, prompt

BLOCK = 16


def attached(model, client, **options):
    options["self_test"] = model.device.type != "cpu"  # it compares with the attention of a CPU, bit by bit
    return kvclient.hf.attach(model, client, in_place=True, **{"block_tokens": BLOCK} | options)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_equals_plain_generation(place, client, left, name):
    model, ids = model_on(place, name), prompt(61).to(place)
    _, logits, _ = generate(model, ids, 1)
    with attached(model, client) as kv:
        for reused in (0, 48):
            _, found, cache = generate(model, ids, 1)
            assert kv.last.reused_tokens == reused, kv.last.bypass_detail
            assert near(found, logits, **bound(place))
        for layer in cache.layers:
            assert type(layer) is DeviceLayer and layer.storage.shape[3] < 48 and layer.origin == 48
            assert layer._held.numel() >= 2 * 48 * layer.shape.heads * layer.shape.head_dim
    assert left() == {}


def test_generation_and_padded_rows(place, client, left):
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    rows = torch.cat([prompt(61), prompt(61, seed=2)]).to(place)
    mask = torch.ones_like(rows)
    rows[1, :21] = mask[1, :21] = 0
    plain, _, _ = generate(model, ids)
    _, row_logits, _ = generate(model, rows, 1, attention_mask=mask)
    with attached(model, client) as kv:
        for _ in range(2):
            tokens, _, _ = generate(model, ids)
            assert place.type != "cpu" or torch.equal(tokens, plain)
        for _ in range(2):
            _, found, _ = generate(model, rows, 1, attention_mask=mask)
            assert near(found, row_logits, **bound(place))
        assert kv.last.reused_tokens == 48 + 27
    assert left() == {}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantised_blocks_stay_as_they_are(place, client, left, codec):
    model, ids = model_on(place, "llama"), prompt(101).to(place)
    options = {"block_tokens": 32, "codec": codec}
    with attached(model, client, **options):
        generate(model, ids, 1)
        _, found, cache = generate(model, ids, 1)
        for layer in cache.layers:
            kinds = [struct.codec for _, struct in layer._prefix]
            assert kinds.count(contract.INT8 if codec == "int8" else contract.INT4) == len(kinds) - 2
        assert left() == {}
        dense = cache.layers[0].keys  # who reads them gets them, dequantised by one launch
        assert dense.shape[2] == 101 and left() == {"read": 1}
    attention.install(model)
    with kvclient.hf.attach(model, client, in_place=False, **options) as kv:
        _, wanted, other = generate(model, ids, 1)
        assert kv.last.reused_tokens == 96
    attention.uninstall(model)
    assert near(found, wanted, 1e-2 if place.type == "cpu" else 3e-2)
    assert float((dense - other.layers[0].keys).abs().max()) <= 1e-2


@pytest.mark.parametrize("readable", [True, False])
def test_layers_come_beside_the_model(place, client, monkeypatch, readable):
    """By a thread, as while blocks are still being written; through the ring where no map can be read."""
    if not readable:
        monkeypatch.setattr(HostMemory, "take", lambda self, *_: None)
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    made = []
    monkeypatch.setattr(
        "kvclient.hf.request.cache_layers.Staged",
        lambda *args: made.append(staging.Staged(*args[:3], patient=True)) or made[-1],
    )
    _, logits, _ = generate(model, ids, 1)
    with attached(model, client) as kv:
        for _ in range(2):
            _, found, _ = generate(model, ids, 1)
            assert near(found, logits, **bound(place))
        assert kv.last.reused_tokens == 48
    assert len(made) == 1 and (made[0].bounced_bytes > 0 or readable)


def test_beams_and_crops_become_dense(place, client, left):
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    with attached(model, client):
        generate(model, ids, 1)
        _, _, cache = generate(model, ids, 1)
        before = [layer.get_seq_length() for layer in cache.layers]
        cache.batch_repeat_interleave(2)
        assert all(layer.keys.shape[:3:2] == (2, n) for layer, n in zip(cache.layers, before, strict=True))
        assert all(torch.equal(layer.values[0], layer.values[1]) for layer in cache.layers)
    assert left() == {"rows": len(before)}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_blocks_are_quantised_on_the_gpu(place, client, monkeypatch, codec):
    """The same bytes as by a CPU: what one wrote the other finds."""
    monkeypatch.setattr(contract, "cuda_lacks", lambda device=0: None)
    source = noise(2, 2, 64, 32, dtype=torch.bfloat16).to(place)
    form = BlockFormat(1, 2, 32, torch.bfloat16, Kivi.named(codec))
    size = 64 * form.codec.bytes_per_token(2, 32)
    written = []
    for devices in ((place.type,), ()):
        monkeypatch.setattr(cuda, "DEVICES", devices)
        block = SimpleNamespace(memory=np.zeros(size, np.uint8))
        block.layer = lambda layer, kept=block: kept.memory
        form.write(block, 0, source)
        written.append(block.memory)
    assert np.array_equal(*written) and written[0].any()
    monkeypatch.setattr(cuda, "DEVICES", (place.type,))
    source[1, 1, 3, 5] = torch.inf
    with pytest.raises(contract.NotQuantisable):
        form.write(block, 0, source)


def test_deviations_are_summed_on_the_gpu(place, monkeypatch):
    monkeypatch.setattr(contract, "cuda_lacks", lambda device=0: None)
    whole = noise(2, 1, 2, 90, 32, dtype=torch.float16).to(place)
    stored, fresh = noise(2, 2, 70, 32, dtype=torch.float16, seed=5).to(place), whole[:, 0, :, 11:81]
    columns = torch.tensor([0, 3, 69])
    monkeypatch.setattr(cuda, "DEVICES", ())
    wanted = blend.compared(stored.cpu(), fresh.cpu(), columns)
    monkeypatch.setattr(cuda, "DEVICES", (place.type,))
    for found, other in zip(blend.compared(stored, fresh, columns.to(place)), wanted, strict=True):
        assert found.shape == (2, 3) and torch.allclose(found.cpu(), other, rtol=1e-5)


@torch.no_grad()
def test_a_copied_cache_goes_on_by_itself(place, client, left):
    """Blocks and tail: whether the copy was made after the first step or before anything was asked for."""
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    more = torch.tensor([[5]], device=place)
    wanted = model(torch.cat([ids, more], 1)).logits[:, -1]
    with attached(model, client):
        generate(model, ids, 1)
        _, _, cache = generate(model, ids, 1)
        for past in (copy.deepcopy(cache), cache):
            assert near(model(more, past_key_values=past).logits[:, -1], wanted, **bound(place))
    assert left() == {}
