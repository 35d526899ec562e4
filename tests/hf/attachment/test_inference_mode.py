"""Proves that attach() and generate() may each be called in torch.inference_mode() or out of it.

Method: a tiny random model is attached in one mode, asked in another, and what it answered is gone on with in
a third; tokens and logits are those of the plain model. Tensors made in that mode cannot be written outside.
"""

import contextlib
import copy

import pytest
import torch

import kvclient.hf
from kvclient.hf import attention
from tests.hf.zoo import generate, known, near, prompt

MODES = {"out": contextlib.nullcontext, "in": torch.inference_mode}
WAYS = {"dense": {"in_place": False}, "in place": {"in_place": True}, "paged": {"paged": True}}


@pytest.mark.parametrize(("attaching", "asking", "going_on"), [("in", "out", "in"), ("out", "in", "out")])
@pytest.mark.parametrize("way", WAYS)
def test_the_modes_of_attach_of_a_call_and_of_what_follows_may_differ(
    way, attaching, asking, going_on, client
):
    if way != "dense" and all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")):
        pytest.skip("no CPU kernels here")
    model, ids = known("llama"), prompt(61)
    plain, logits, _ = generate(model, ids, 12)
    with MODES[attaching]():
        kv = kvclient.hf.attach(model, client, block_tokens=16, **WAYS[way])
    with kv:
        with MODES[asking]():
            for reused in (0, 48):
                tokens, _, cache = generate(model, ids, 4)
                assert kv.last.reused_tokens == reused
            twin = copy.deepcopy(cache)
            repeated = copy.deepcopy(cache)
            repeated.batch_repeat_interleave(2)
        with MODES[going_on]():
            for past in (cache, twin, repeated):
                rows = 2 if past is repeated else 1
                rest, found, _ = generate(model, tokens.repeat(rows, 1), 8, past_key_values=past)
                assert torch.equal(rest, plain.repeat(rows, 1)) and near(found[:, :1], logits[4:])
