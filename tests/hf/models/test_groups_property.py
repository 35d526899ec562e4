"""Whatever layers a model has, whatever is asked and whatever was evicted of one group: what is served is a
full prefill's answer, or a miss.

Goal: the rule of layer groups, over models nobody chose. Method: Hypothesis draws the kinds of layers, their
window, the size of blocks, how often states are stored, and a history of prompts that share beginnings, with
blocks of single groups (or layers that need all tokens, or states) deleted between them. Each answer is
compared with plain generate()'s, greedy in fp32. It shrinks to the shortest history that fails.
"""

# ruff: noqa: C408

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvclient
import kvclient.hf
from kvclient.hf.release import INDEXED, STATES
from tests.hf.zoo import VOCAB, generate, prompt

NEW = 5
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, initializer_range=0.15, max_position_embeddings=512, pad_token_id=0,
)  # fmt: skip
LEAST = 3  # tokens of a window where no layer has all: of two one is kept, refused as its shape is not told
WINDOWED = st.sampled_from(["sliding_attention", "full_attention"])
RECURRENT = st.sampled_from(["linear_attention", "full_attention"])


def windowed(kinds: list[str], window: int):
    config = transformers.Gemma2Config(
        num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window, **SIZES
    )
    return made(transformers.Gemma2ForCausalLM, config)


def recurrent(kinds: list[str], _window: int):
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=len(kinds) + 1, layer_types=[*kinds, "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16, **SIZES,
    )  # fmt: skip
    return made(transformers.Qwen3NextForCausalLM, config)


def indexed(kinds: list[str], _window: int):
    config = transformers.DeepseekV32Config(
        num_hidden_layers=len(kinds), mlp_layer_types=["dense"] * len(kinds), q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, index_topk=8, index_head_dim=16,
        index_n_heads=8, **SIZES | dict(head_dim=8, num_key_value_heads=4),
    )  # fmt: skip
    return made(transformers.DeepseekV32ForCausalLM, config)


def compressed(kinds: list[str], window: int):
    """"full_attention" stands for entries of two tokens, the other kind for a window, behind one of four."""
    names = {"full_attention": "compressed_sparse_attention", "sliding_attention": "sliding_attention"}
    kinds = ["heavily_compressed_attention", *(names[kind] for kind in kinds)]
    window = max(window, LEAST)
    config = transformers.DeepseekV4Config(
        num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window, q_lora_rank=16, o_groups=2,
        compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=4), o_lora_rank=16,
        mlp_layer_types=["moe"] * len(kinds), index_head_dim=16, index_n_heads=8, index_topk=4, hc_mult=2,
        hc_sinkhorn_iters=2, n_routed_experts=2, num_experts_per_tok=2, moe_intermediate_size=16,
        **SIZES | dict(num_key_value_heads=1),
    )  # fmt: skip
    return made(transformers.DeepseekV4ForCausalLM, config)


def windows_and_states(kinds: list[str], window: int):
    """RecurrentGemma: its states lie in its modules. Without a window transformers has no cache for it."""
    kinds, window = [*kinds, "sliding_attention"], max(window, LEAST)
    names = {"full_attention": "recurrent", "sliding_attention": "attention"}
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=len(kinds) + 1, block_types=[*(names[kind] for kind in kinds), "recurrent"],
        lru_width=32, attention_window_size=window, **SIZES,
    )  # fmt: skip
    return made(transformers.RecurrentGemmaForCausalLM, config)


def made(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    model.generation_config.eos_token_id = None
    return model


# A step: which of two texts the prompt begins with, how far, how many new tokens follow, and what is deleted
# before it: of a stored chain, the block at a share of its length.
STEP = st.tuples(
    st.integers(0, 1), st.integers(0, 90), st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.99)), max_size=3),
)  # fmt: skip


def answers_are_a_full_prefills(model, block: int, every: int, steps) -> int:
    """How many tokens were reused over the whole history."""
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(
            model, client, block_tokens=block, state_every_blocks=every, self_test=False
        ) as kv,
    ):
        served, asked = kv._chosen(), []
        stored = [served, *served.groups, *([served.states] if served.states is not None else [])]
        for number, (text, cut, new, deleted) in enumerate(steps):
            for which, share in deleted if asked else ():
                chain = kv.chunker.chain(stored[which % len(stored)].identity, asked[-1][0].numpy())
                if len(chain):
                    client.delete([chain.keys[int(share * len(chain))]])
            begun = prompt(90, seed=text + 1)[:, :cut]
            ids = torch.cat([begun, prompt(new, seed=100 + number)], dim=1)
            for module in model.modules():
                if hasattr(module, "conv1d_state"):  # RecurrentGemma: else a token alone goes on with them
                    module.conv1d_state = module.rg_lru.recurrent_states = None
            with kv.bypass():
                plain, *_ = generate(model, ids, NEW)
            tokens, *_ = generate(model, ids, NEW)
            assert kv.last.bypassed is None and kv.last.store_error is None
            assert torch.equal(tokens, plain), (number, kv.last)
            asked.append(ids)
        return kv.stats["reused_tokens"]


PROFILE = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(PROFILE, max_examples=150, derandomize=False)
HISTORY = dict(
    block=st.sampled_from([4, 8, 16]), every=st.integers(1, 4), steps=st.lists(STEP, min_size=2, max_size=6)
)


@settings(PROFILE, max_examples=8)
@given(kinds=st.lists(WINDOWED, min_size=1, max_size=4), window=st.integers(2, 40), **HISTORY)
def test_windows(kinds, window, block, every, steps):
    answers_are_a_full_prefills(windowed(kinds, window), block, every, steps)


@pytest.mark.skipif(not STATES, reason="this transformers keeps states in caches of its models")
@settings(PROFILE, max_examples=4)
@given(kinds=st.lists(RECURRENT, min_size=1, max_size=3), **HISTORY)
def test_states(kinds, block, every, steps):
    answers_are_a_full_prefills(recurrent(kinds, 0), block, every, steps)


NEWER = [windows_and_states] + ([indexed] if INDEXED else [])
NEWER += [compressed] if hasattr(transformers, "DeepseekV4Config") else []


@pytest.mark.slow
@pytest.mark.parametrize("make", NEWER)
@settings(PROFILE, max_examples=2)
@given(kinds=st.lists(WINDOWED, min_size=1, max_size=2), window=st.integers(2, 20), **HISTORY)
def test_what_is_kept_besides(make, kinds, window, block, every, steps):
    answers_are_a_full_prefills(make(kinds, window), block, every, steps)


@pytest.mark.slow
@MANY
@given(
    make=st.sampled_from([windowed, recurrent, *NEWER] if STATES else [windowed]),
    marked=st.lists(st.booleans(), min_size=1, max_size=5), window=st.integers(2, 40), **HISTORY,
)  # fmt: skip
def test_many(make, marked, window, block, every, steps):
    other = "linear_attention" if make is recurrent else "sliding_attention"
    kinds = [other if mark else "full_attention" for mark in marked]
    answers_are_a_full_prefills(make(kinds, window), block, every, steps)


def test_the_histories_do_reuse():
    """Otherwise all of the above would hold of a store that never hits."""
    steps = [(0, 90, 9, []), (0, 90, 9, [(1, 0.4)]), (0, 90, 7, []), (0, 60, 8, []), (0, 60, 8, [])]
    reused = answers_are_a_full_prefills(windowed(["sliding_attention", "full_attention"], 16), 8, 2, steps)
    assert reused > 100
