"""What is refused of reuse inside prompts, with the reason: models whose keys cannot be moved, wrong
conventions, wrong arguments.
"""

import numpy as np
import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient import kernels
from kvclient.errors import InvalidArgument
from kvclient.hf.model.rope import rotated
from kvclient.hf.reuse.repair import Repair
from tests.hf.census import TINY
from tests.hf.zoo import build, generate, prompt

BLOCK = 16


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=6)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("gpt2", "learned"),
        ("opt", "learned"),
    ],
)
def test_models_whose_keys_cannot_be_moved_are_refused_with_the_reason(client, name, word):
    model = build(name)
    with pytest.raises(kvclient.hf.Refused, match=word):
        kvclient.hf.attach(model, client, block_tokens=BLOCK, repair="auto")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:  # prefixes are still served
        generate(model, prompt(40))
        generate(model, prompt(40))
        assert kv.last.reused_tokens == 32


def test_a_model_whose_layers_take_more_than_rows_is_refused_with_what_it_raised(client):
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    sizes = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16, "global_head_dim": 32}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 16}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**TINY, **sizes)).eval()
    model.generation_config.eos_token_id = None
    with pytest.raises(kvclient.hf.Refused, match=r"over some rows of a prompt \(RuntimeError"):
        kvclient.hf.attach(model, client, block_tokens=BLOCK, repair="selective")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:  # prefixes are still served
        for _ in range(2):
            generate(model, prompt(40))
        assert kv.last.reused_tokens == 32


def test_a_wrong_convention_is_refused(model, client, monkeypatch):
    """The proof at attach fails if keys are turned wrongly, or if rows see what they must not."""
    from kvclient.hf.model import rope
    from kvclient.hf.reuse import blend

    turn = rope.Rope.turn
    with monkeypatch.context() as patched:
        patched.setattr(
            rope.Rope, "turn", lambda self, layer, keys, shift, out: turn(self, layer, keys, shift + 1, out)
        )
        with pytest.raises(kvclient.hf.Refused, match="some rows"):
            kvclient.hf.attach(model, client, repair="auto", self_test=False)
    with monkeypatch.context() as patched:
        patched.setattr(blend.Blend, "_masked", lambda self, mask, hidden, rows: None)
        with pytest.raises(kvclient.hf.Refused, match="some rows"):
            kvclient.hf.attach(model, client, repair="auto", self_test=False)


@pytest.mark.parametrize(
    "wrong",
    [{"method": "best"}, {"ratio": 1.5}, {"sink_tokens": -1}, {"min_tokens": 0}, {"check_layer": -1}],
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Repair(**wrong)


@pytest.mark.parametrize("convention", ["half", "interleaved"])
def test_the_native_turn_is_the_definition(convention):
    keys = torch.randn(3, 17, 16, generator=torch.Generator().manual_seed(1))
    inv_freq = (10_000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)
    for shift in (1, -1, 300, -4000):
        out = np.empty(keys.shape, np.float32)
        kernels.rotate(keys.numpy(), kernels.turn(inv_freq, shift), convention, out=out)
        wanted = rotated(keys, inv_freq, shift, convention)
        torch.testing.assert_close(torch.from_numpy(out).double(), wanted, rtol=0, atol=2e-6)
