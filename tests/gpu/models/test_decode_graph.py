"""Proves that the step of kv.decode_graph() can be captured as a CUDA graph, and replays what the model says.

Method: tiny random models on the GPU against their own generate(), cold and warm, alone and in padded rows;
that the graph is replayed, and not the model run, is counted. Without a GPU
tests/hf/attention/test_decode_graph.py runs the same step, again and again instead of recorded; in place
that is done here, on the emulation.
"""

import copy

import pytest
import torch

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import StoppingCriteriaList

import kvclient
import kvclient.hf
from kvclient.hf import attention
from kvclient.hf.cache.static import StaticDeviceLayer
from kvclient.hf.decoding import decode_step
from tests.gpu.models.bound import bound, model_on
from tests.hf.zoo import generate, known, near, prompt


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_says_what_the_model_says(name, dtype, gpu, monkeypatch):
    model = known(name, dtype).to(gpu)
    rows = torch.cat([prompt(61), prompt(61, seed=2)]).to(gpu)
    mask = torch.ones_like(rows)
    rows[1, :21] = mask[1, :21] = 0
    ids = prompt(61).to(gpu)
    plain, logits, _ = generate(model, ids, 30)
    plain_rows, row_logits, _ = generate(model, rows, 30, attention_mask=mask)
    replayed = []
    original = decode_step.record_cuda

    def record(run):
        replay, out = original(run)
        return lambda: (replayed.append(1), replay()), out

    monkeypatch.setattr(decode_step, "record_cuda", record)
    attention.install(model)
    exact, bound = dtype == torch.float32, 1e-4 if dtype == torch.float32 else 5e-2
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
        kv.decode_graph(),
    ):
        for _ in range(2):
            tokens, found, _ = generate(model, ids, 30)
            assert near(found[0], logits[0], bound)
            assert torch.equal(tokens, plain) or not exact
            tokens, found, _ = generate(model, rows, 30, attention_mask=mask)
            assert near(found[0], row_logits[0], bound)
            assert torch.equal(tokens, plain_rows) or not exact
        assert kv.last.reused_tokens > 0
    assert len(replayed) == 4 * 29


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_step_reads_the_stores_blocks_in_place(place, client, left, monkeypatch, codec):
    """Cold and warm: no dense prefix, and nothing that the host knows in a step."""
    model, ids = model_on(place, "llama"), prompt(101).to(place)
    plain, logits, _ = generate(model, ids, 9)
    seen = []
    original = decode_step.Step._run

    def run(self):
        out = original(self)
        layers = self._cache.layers
        where = [(layer._storage.data_ptr(), layer._call[0].memory.data_ptr()) for layer in layers]
        known_lengths = {layer._length for layer in layers}
        seen.append((self._ids.data_ptr(), self._steps.workspace.memory.data_ptr(), *where, *known_lengths))
        return out

    monkeypatch.setattr(decode_step.Step, "_run", run)
    options = {"block_tokens": 32, "codec": codec, "self_test": place.type != "cpu"}
    with kvclient.hf.attach(model, client, in_place=True, **options) as kv, kv.decode_graph():
        for reused in (0, 96):
            seen.clear()
            tokens, found, cache = generate(model, ids, 9)
            assert kv.last.reused_tokens == reused
            assert near(found[0], logits[0], 1e-2 if codec else bound(place).get("bound", 1e-5))
            assert place.type != "cpu" or codec or torch.equal(tokens, plain)
            assert len(set(seen)) == 1 and (len(seen) == 9 or place.type != "cpu")
            for layer in cache.layers:
                assert type(layer) is StaticDeviceLayer and layer.origin == reused
                assert layer.storage.shape[3] == 101 + 9 - reused and layer.get_seq_length() == 109
        assert left() == {}
        more = prompt(1, seed=5).to(place)
        with torch.no_grad():  # the cache goes on alone
            found = model(more, past_key_values=cache).logits
            wanted = model(torch.cat([tokens[:, :109], more], 1)).logits[:, -1:]
        assert near(found, wanted, 1e-2 if codec else bound(place).get("bound", 1e-5))


def test_rows_of_a_step_in_place_see_no_padding(place, client, left):
    model = model_on(place, "llama")
    rows = torch.cat([prompt(61), prompt(61, seed=2)]).to(place)
    mask = torch.ones_like(rows)
    rows[1, :21] = mask[1, :21] = 0
    plain, logits, _ = generate(model, rows, 4, attention_mask=mask)
    options = {"block_tokens": 16, "self_test": place.type != "cpu", "in_place": True, "paged": True}
    with kvclient.hf.attach(model, client, **options) as kv, kv.decode_graph():
        for _ in range(2):
            tokens, found, cache = generate(model, rows, 4, attention_mask=mask)
            assert near(found[0], logits[0], **bound(place))
            assert place.type != "cpu" or torch.equal(tokens, plain)
        assert kv.last.reused_tokens == 48 + 27
        keys = cache.layers[0].keys  # who reads them gets them
        assert keys.shape[2] == 64
    assert left() == {"paged": 2, "read": 1}


def test_a_cache_that_was_copied_takes_no_further_step(place, client, monkeypatch):
    """The copied layers go on as any others: the host would not learn of what a graph replayed."""
    model, ids = model_on(place, "llama"), prompt(61).to(place)
    plain, *_ = generate(model, ids, 12)
    ran, caches, copies = [], [], []
    original = decode_step.Step._run

    def run(self):
        caches.append(self._cache)
        return original(self)

    def snapshot(ids, scores):
        if len(caches) >= 3 and not copies:  # a GPU runs it twice to warm up, and to record it
            copies.append(copy.deepcopy(caches[-1]))
            ran.append(len(caches))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    monkeypatch.setattr(decode_step.Step, "_run", run)
    options = {"block_tokens": 16, "in_place": True, "self_test": place.type != "cpu"}
    with kvclient.hf.attach(model, client, **options) as kv, kv.decode_graph():
        tokens, _, cache = generate(model, ids, 12, stopping_criteria=StoppingCriteriaList([snapshot]))
    assert ran == [len(caches)] and cache.get_seq_length() == 61 + 11
    assert place.type != "cpu" or torch.equal(tokens, plain)
