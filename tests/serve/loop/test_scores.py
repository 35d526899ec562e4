"""Proves that scoring a long prompt (echo with logprobs) holds the logits of a piece of it at a time, and
tells what one pass over the whole would.

Method: tiny random models in fp32 (with windows, soft caps and sinks too), prompts around the borders of the
pieces; the rows that the model's head computes are counted, the scores are held against plain transformers.
"""

import types

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.serve.engine.passes import SCORED_TOKENS, Passes
from tests.hf.zoo import build, prompt


@pytest.fixture(params=["llama", "gemma2", "gpt2", "gpt_oss", "qwen3_next"])
def scored(request):
    """model, and the function that scores a prompt as a request with 3 alternatives."""
    model = build(request.param, max_position_embeddings=2048)
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        passes = Passes(model, kv)

        def score(ids, **more):
            asked = {"tokens": [], "prompt_logprobs": 3, "cancelled": False, **more}
            job = types.SimpleNamespace(prompt=ids[0].tolist(), **asked)
            with torch.no_grad():
                return passes.prompt_logprobs(job, ids)

        yield model, score


@pytest.mark.parametrize("tokens", [1, 2, SCORED_TOKENS, SCORED_TOKENS + 1, 2 * SCORED_TOKENS + 77])
def test_scores_are_those_of_one_pass_and_logits_are_held_piece_by_piece(scored, tokens):
    model, score = scored
    ids = prompt(tokens, seed=tokens)
    with torch.no_grad():
        wanted = type(model).forward(model, input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    rows = []
    hook = model.get_output_embeddings().register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    told = score(ids)
    hook.remove()
    states = "Next" in type(model).__name__  # go on token by token only: such a prompt is one piece
    assert sum(rows) == tokens and max(rows) <= (tokens if states else SCORED_TOKENS)
    assert told[0] is None and len(told) == tokens
    for at, said in enumerate(told[1:]):
        assert said.token == ids[0, at + 1]
        assert abs(said.logprob - float(wanted[at, said.token])) < 1e-4
        torch.testing.assert_close(
            torch.tensor([logprob for _, logprob in said.top]), wanted[at].topk(3).values, atol=1e-4, rtol=0
        )


def test_who_hung_up_is_not_scored_to_the_end(scored):
    model, score = scored
    rows = []
    hook = model.get_output_embeddings().register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    assert score(prompt(2 * SCORED_TOKENS), cancelled=True) == () and not rows
    hook.remove()
