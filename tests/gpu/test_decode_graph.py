"""Proves that the step of kv.decode_graph() can be captured as a CUDA graph, and replays what the model says.

Method: tiny random models on the GPU against their own generate(), cold and warm, alone and in padded rows;
that the graph is replayed, and not the model run, is counted. Without a GPU
tests/engines/test_decode_graph.py runs the same step, again and again instead of recorded.
"""

import pytest
import torch

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")

import kvclient
import kvclient.hf
from kvclient.hf import attention, graph
from tests.engines.zoo import generate, known, near, prompt


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
    own = graph.record_cuda

    def record(run):
        replay, out = own(run)
        return lambda: (replayed.append(1), replay()), out

    monkeypatch.setattr(graph, "record_cuda", record)
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
