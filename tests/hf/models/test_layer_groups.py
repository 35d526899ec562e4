"""Layer groups: whatever is missing of one group's blocks, what is served is a full prefill's answer, or a
miss.

Tiny random models with windows, chunks and states. Blocks of single groups are deleted, come from a disk
after a restart, or are still being written by a process that dies; `test_random_*` does it at random, from
seeds.
"""

import random

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.hf.release import STATES
from tests.daemon.disk.test_disk_tier import files
from tests.hf.store.test_disk import patient, served  # noqa: F401 fixtures
from tests.hf.store.test_follow import WAIT_S, Call, gate  # noqa: F401 a fixture
from tests.hf.zoo import RECURRENT, VOCAB, generate, known, near, prompt

BLOCK, NEW = 8, 12


def served_here(name):
    """The model, or the test is skipped: older releases keep states in caches of their models' own."""
    if name in RECURRENT and not STATES:
        pytest.skip(f"this transformers keeps the states of {name} elsewhere")
    return known(name)


def chains(kv, ids):
    """Of the layers that need all tokens, of each group, and of states."""
    served_model, tokens = kv._chosen(), ids[0].numpy()
    stored = [*served_model.groups, *([served_model.states] if served_model.states else [])]
    identities = kv.identity, *(part.identity for part in stored)
    return [kv.chunker.chain(identity, tokens) for identity in identities]


def windowed(seed, layers=4):
    """A model with layers of random windows, and its BLOCK."""
    draw = random.Random(seed)
    kinds = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, initializer_range=0.15,
        max_position_embeddings=512, pad_token_id=0, sliding_window=draw.randint(3, 40), layer_types=kinds,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model, draw.choice([4, 8, 16]), draw


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_windows_hits_and_evictions_of_single_groups(seed, client):
    model, block, draw = windowed(seed)
    texts = [prompt(draw.randint(1, 130), seed=1000 * seed + i) for i in range(3)]
    with kvclient.hf.attach(model, client, block_tokens=block) as kv:
        for step in range(12):
            base = draw.choice(texts)
            cut = draw.randint(0, base.shape[1])
            ids = torch.cat([base[:, :cut], prompt(draw.randint(1, 20), seed=seed * 100 + step)], dim=1)
            rows = [ids] if draw.random() < 0.7 else [ids, prompt(ids.shape[1], seed=step)]
            ids = torch.cat(rows)
            with kv.bypass():
                plain, *_ = generate(model, ids, NEW)
            tokens, *_ = generate(model, ids, NEW)
            assert kv.last.bypassed is None
            assert torch.equal(tokens, plain), (seed, step, kv.last)
            for chain in chains(kv, ids[:1]):
                if len(chain) and draw.random() < 0.4:
                    keys = list(chain.keys)
                    client.delete([draw.choice(keys) for _ in range(2)])
        assert kv.stats["reused_tokens"] or kv.stats["requests"]


@pytest.mark.parametrize("name", ["gemma2", "llama4", "qwen3_next", "falcon_h1", "mistral_sliding"])
def test_without_one_block_of_a_group_a_hit_ends_before_it_or_is_none(name, client):
    model, ids = served_here(name), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        with kv.bypass():
            plain, *_ = generate(model, ids, NEW)
        for group in range(1, len(chains(kv, ids))):
            generate(model, ids, NEW)
            generate(model, ids, NEW)
            assert kv.last.reused_tokens == 56
            assert client.delete([chains(kv, ids)[group].keys[6]]) == 1
            tokens, *_ = generate(model, ids, NEW)
            assert kv.last.reused_tokens < 56
            assert torch.equal(tokens, plain)


def test_a_prompt_with_windows_needs_a_part_of_what_full_attention_does(client):
    """A Gemma 3 270M in shape (18 layers, every sixth sees all, windows of 512), of a tiny width."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)]
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=18, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=512, layer_types=kinds, pad_token_id=0,
        max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    shares = {}
    with kvclient.hf.attach(model, client, self_test=False, publish_generated=False) as kv:
        served_model = kv._chosen()
        forms = [served_model.form, *(group.form for group in served_model.groups)]
        assert [form.layers for form in forms] == [3, 15]
        assert kv._model_state.kv.groups[0].window == 512
        for tokens in (1024, 4096):
            generate(model, prompt(tokens, seed=tokens), 1)
            counts = (kv.last.published_blocks, kv.last.published_group_blocks)
            used = sum(n * form.layout(128).block_bytes() for n, form in zip(counts, forms, strict=True))
            full = tokens // 128 * kvclient.Layout(18, 1, 32, "float32", 128).block_bytes()
            shares[tokens] = used / full
        generate(model, prompt(4096, seed=4096), 1)
        assert kv.last.reused_tokens == 4095
    print(f"bytes stored of those of full attention: {shares}")
    assert shares[4096] <= 0.4
    assert shares[1024] <= 0.7


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_groups_come_back_from_disk_after_a_restart(name, served, patient, wait_until, tmp_path):  # noqa: F811
    model, ids = served_here(name), prompt(70)
    plain, *_ = generate(model, ids)
    with served.connect() as client, kvclient.hf.attach(model, client, block_tokens=16) as kv:
        generate(model, ids, 1)
        stored = kv.last.published_blocks + kv.last.published_group_blocks
        wait_until(lambda: len(files(tmp_path)) >= stored, "the blocks are written")
        served.restart()
        wait_until(lambda: client.stats()["on_disk"] >= stored, "the directory is indexed")
        tokens, *_ = generate(model, ids)
        assert torch.equal(tokens, plain)
        assert kv.last.reused_tokens == 64


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "falcon_h1"])
def test_followed_and_a_writer_that_dies(name, dies, gate, wait_until):  # noqa: F811
    ids = prompt(70)
    with kvclient.InMemoryClient(64 << 20) as store, store.another() as other:
        models = [served_here(name), served_here(name)]
        plain, *_ = generate(models[0], ids)
        made = [
            kvclient.hf.attach(model, client, block_tokens=16, follow_timeout_s=WAIT_S)
            for model, client in zip(models, (store, other), strict=True)
        ]
        closed = gate(store, 0)
        writing = Call(models[0], ids)
        assert closed.reached.wait(WAIT_S)
        following = Call(models[1], ids)
        wait_until(lambda: store.stats()["pins"] >= 1, "the follower's pins on blocks being written")
        if dies:
            closed.error = KeyboardInterrupt()
        closed.opened.set()
        writing.join(WAIT_S)
        assert torch.equal(following.result(), plain)
        assert isinstance(writing.error, KeyboardInterrupt) == dies
        assert made[1].last.reused_tokens == (0 if dies else 64)
        assert store.stats()["pins"] == 0
        for kv in made:
            kv.detach()


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral_sliding"])
def test_int8_blocks_with_windows(name, client):
    model, ids = served_here(name), prompt(99)
    with kvclient.hf.attach(model, client, block_tokens=32, codec="int8") as kv:
        _, plain, _ = generate(model, ids, 1)
        _, warm, _ = generate(model, ids, 1)
        assert kv.last.reused_tokens == 96
        assert near(warm, plain, 0.05)


@pytest.mark.parametrize("in_place", [False, None])
@pytest.mark.parametrize("name", ["gemma2", "mistral_sliding"])
def test_what_a_loop_of_ones_own_computed_can_be_published(name, in_place, client):
    model, ids = served_here(name), prompt(61)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=in_place) as kv:
        with kv.limited(publish_tokens=0):
            answered, _, cache = generate(model, ids, NEW)
        assert kv.last.published_blocks == 0
        assert kv.publish(answered[0].tolist(), cache) == 9
        longer = torch.cat([answered, prompt(5, seed=4)], dim=1)
        with kv.bypass():
            plain, *_ = generate(model, longer, NEW)
        tokens, *_ = generate(model, longer, NEW)
        assert kv.last.reused_tokens == 72
        assert torch.equal(tokens, plain)


@pytest.mark.parametrize("name", ["gemma2", "falcon_h1"])
def test_a_pin_holds_windows_and_states_too(name, client):
    model, ids = served_here(name), prompt(60) % 250 + 3
    tokenizer = type("Tokens", (), {"decode": lambda self, ids: "x" * len(ids), "eos_token_id": None})()
    with kvclient.hf.Engine(model, tokenizer, client, block_tokens=BLOCK, self_test=False) as engine:
        generate(model, ids, 1)
        groups = engine.kv.last.published_group_blocks
        assert groups
        assert engine.pin(ids[0].tolist()) == client.stats()["pins"] == 7 + groups
        engine.unpin(ids[0].tolist())
    assert client.stats()["pins"] == 0
