"""Proves that a call which is disturbed (an interrupt, no memory, another thread) says so or goes on right,
and that the next one is right.

Method: tiny random models; what disturbs is put where it hurts, at a named place of the code, once.
"""

import numpy as np
import pytest
import torch

import kvclient.hf
from kvclient.hf import attention
from kvclient.hf.model.rope import Rope, Turning
from tests.hf.zoo import generate, known, prompt

BLOCK = 16


@pytest.mark.parametrize("paged", [False, True])
def test_attention_that_is_switched_in_a_call_ends_it(client, monkeypatch, paged):
    """By another thread's detach(): the masks of the pass are for the kernels, and mean something else."""
    if all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")):
        pytest.skip("no CPU kernels here")
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=True, paged=paged) as kv:
        generate(model, ids)
        before_last = type(model.model.layers[1].mlp)
        original, calls = before_last.forward, []

        def forward(self, hidden):
            if hidden.shape[1] == ids.shape[1]:  # no look at the model, which was given another forward
                calls.append(0)
            if len(calls) == 2:
                kv.detach()
            return original(self, hidden)

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in generate"):
            patch.setattr(before_last, "forward", forward)
            generate(model, ids)
    assert torch.equal(generate(model, ids)[0], plain)
    assert (client.stats()["pins"], client.stats()["created"]) == (0, 0)


def test_an_interrupt_while_hooks_are_put_on_leaves_none(client, monkeypatch):
    """They would cut the rows of whatever this thread computes next."""
    model, document = known("llama"), prompt(64, seed=4)
    ids = torch.cat([prompt(11, seed=5), document, prompt(15, seed=6)], 1)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, repair="selective", self_test=False) as kv:
        generate(model, document)
        last = model.model.layers[-1]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(last, "register_forward_pre_hook", interrupted)
            generate(model, ids)
        assert not any(module._forward_pre_hooks for module in model.modules())
        generate(model, ids, 4)
        assert kv.last.approximate_tokens == 64
    assert (client.stats()["pins"], client.stats()["created"]) == (0, 0)


def interrupted(*_args, **_given):
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_want_of_memory_is_no_reason_to_refuse_a_model(client, monkeypatch, error):
    """When it is looked at again because its weights changed: it would be refused until they change again."""
    model, ids = known("llama"), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        with torch.no_grad():
            model.lm_head.weight.add_(0.01)
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(type(model), "forward", _full(error))
            generate(model, ids)
        plain = generate_without(kv, model, ids)
        for reused in (0, 48):
            tokens, *_ = generate(model, ids)
            assert (kv.last.bypassed, kv.last.reused_tokens) == (None, reused)
            assert torch.equal(tokens, plain)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(type(model), "forward", _full(error))
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
    assert model.config._attn_implementation == "sdpa" and "generate" not in model.__dict__


def _full(error):
    def forward(self, input_ids=None, past_key_values=None, use_cache=None, **_given):
        raise error("no memory")

    return forward


def generate_without(kv, model, ids):
    with kv.bypass():
        return generate(model, ids)[0]


class Cleared(dict):
    """As another thread leaves it that clears it at once."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.clear()


class Shortened(dict):
    """As another thread leaves it that needs fewer places, and puts them there at once."""

    def __setitem__(self, key, value):
        super().__setitem__(key, tuple(table[:1] for table in value))


def test_threads_that_turn_keys_share_tables_and_need_not_wait():
    inv_freq = np.array([1.0, 0.5], np.float32)
    rope, other = Rope([Turning("half", inv_freq)]), Rope([Turning("half", inv_freq)])
    rope._turns, rope._places = Cleared(), Shortened()
    keys = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    turned, wanted = np.empty_like(keys), np.empty_like(keys)
    rope.turn(0, keys, 3, turned)
    other.turn(0, keys, 3, wanted)
    assert np.array_equal(turned, wanted)
    mine, theirs = torch.from_numpy(keys.copy()), torch.from_numpy(keys.copy())
    rope.turn_each(0, mine, torch.tensor([1, 4, 7]), 1)
    other.turn_each(0, theirs, torch.tensor([1, 4, 7]), 1)
    assert torch.equal(mine, theirs)
