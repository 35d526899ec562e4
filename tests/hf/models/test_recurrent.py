"""Recurrent layers (Qwen3-Next, Falcon-H1, Mamba and others): a hit ends where a state is stored, and answers
are those of plain generate().

Tiny random models in fp32. A prompt is cut where states are stored, so logits are equal to rounding; tokens
are compared for equality.
"""

import sys
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvclient
import kvclient.hf
from kvclient.hf.release import STATES, passing
from tests.hf.zoo import RECURRENT, build, generate, known, near, prompt
from tests.warm_python import run as run_warm

ROOT = Path(__file__).resolve().parents[3]
BLOCK, NEW = 8, 18
pytestmark = pytest.mark.skipif(not STATES, reason="this transformers keeps states in caches of its models")
# So far from its pass over several tokens is transformers' own step by step, without a store, of these.
STEPS_APART = {"zamba2": 1e-3, "nemotron_h": 1e-3}
# States alone, beside K and V, no K and V, step by step.
SOME = ("qwen3_next", "falcon_h1", "mamba", "jamba")
NAMES = [pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in RECURRENT]


@pytest.fixture
def attached(client):
    made = []

    def attach(model, **options):
        made.append(kvclient.hf.attach(model, client, block_tokens=BLOCK, **options))
        return made[-1]

    yield attach
    for kv in made:
        kv.detach()


def check(model, kv, ids, *reused, bound=1e-4, **options):
    """For each number: the answer with the store, which takes so many tokens from it, is that without."""
    with kv.bypass():
        plain, plain_logits, _ = generate(model, ids, NEW, **options)
    for wanted in reused:
        tokens, logits, _ = generate(model, ids, NEW, **options)
        assert (kv.last.reused_tokens, kv.last.bypassed) == (wanted, None)
        assert torch.equal(tokens, plain)
        assert all(near(found, other, bound) for found, other in zip(logits, plain_logits, strict=True))
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_cold_warm_continued_and_parted(name, attached):
    model = known(name)
    kv, bound = attached(model), STEPS_APART.get(name, 1e-4)
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 61):
        ids = prompt(length, seed=length)
        answered = check(model, kv, ids, 0, (length - 1) // BLOCK * BLOCK, bound=bound)
    longer = torch.cat([answered, prompt(5, seed=4)], dim=1)
    check(model, kv, longer, (61 + NEW - 1) // BLOCK * BLOCK, bound=bound)  # the answer's last whole block
    shared = prompt(40, seed=77)
    for seed, reused in ((1, 0), (2, 0), (3, 40)):  # where two texts part is known when the second was asked
        check(model, kv, torch.cat([shared, prompt(11, seed=seed)], dim=1), reused, bound=bound)


@pytest.mark.parametrize("name", [*SOME, "minimax", "recurrent_gemma"])
def test_batches_and_beams(name, attached):
    model = known(name)
    kv = attached(model)
    ids = torch.cat([prompt(45), prompt(45, seed=2), prompt(45)])
    check(model, kv, ids, 0, 3 * 40)
    check(model, kv, prompt(45), 3 * 40, num_beams=3)  # each beam has a row from the start


@pytest.mark.parametrize("name", SOME[:2])
def test_states_every_so_many_blocks_and_their_bytes(name, client):
    """Another process, with another state_every_blocks, finds them: where they are is no part of the
    identity."""
    model, other = known(name), known(name)
    ids = prompt(12 * BLOCK + 3)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, state_every_blocks=2) as kv:
        generate(model, ids)
        assert kv.last.published_group_blocks == 7  # with that behind the answer's last whole block
        states = [layer for layer in one_pass(model, ids).layers if hasattr(layer, "conv_states")]
        tensors = [t for layer in states for t in (layer.conv_states[0], layer.recurrent_states[0])]
        assert kv.state_bytes == sum(-(-t.nbytes // 16) * 16 for t in tensors)
        identity = kv.identity
    with kvclient.hf.attach(other, client, block_tokens=BLOCK, state_every_blocks=100) as kv:
        assert kv.identity == identity
        for parted, reused in ((7, 6), (8, 8), (3, 2)):  # blocks; the state at or before it
            ids_parted = torch.cat([ids[:, : parted * BLOCK], prompt(9, seed=parted)], dim=1)
            check(other, kv, ids_parted, reused * BLOCK)


def one_pass(model, ids):
    with torch.no_grad():
        return kvclient.hf.release.cache_of(model(ids, use_cache=True))


def test_what_a_state_cannot_have_is_refused_with_the_reason(client):
    model = known("qwen3_next")
    refused = {"in_place": (True, "recurrent"), "repair": ("auto", "recurrent")}
    refused["chunker"] = ("sentence", "blocks of one size")
    tokenizer = type("Tokens", (), {"decode": lambda self, ids: "x" * len(ids)})()
    for name, (value, reason) in refused.items():
        with pytest.raises(kvclient.InvalidArgument, match=reason):
            kvclient.hf.attach(model, client, **{name: value}, tokenizer=tokenizer)
        assert "generate" not in model.__dict__
    for every in (0, -1, 2.5):
        with pytest.raises(kvclient.InvalidArgument, match="state_every_blocks"):
            kvclient.hf.attach(model, client, state_every_blocks=every)


def padded():
    """Two rows of 45 and 24 tokens, and their mask."""
    ids = torch.cat([prompt(45), prompt(45, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :21] = mask[1, :21] = 0
    return ids, mask


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_padding_are_each_computed_by_itself(name, attached):
    """As long as the model's own answer to a row hangs on no padding before it: the self-test has tried."""
    model = known(name)
    kv, bound = attached(model), STEPS_APART.get(name, 1e-4)
    ids, mask = padded()
    tokens = check(model, kv, ids, 0, 40 + 16, attention_mask=mask, bound=bound)
    assert [row.reused_tokens for row in kv.last.rows] == [40, 16]
    for row, length in enumerate((45, 24)):  # what rows say is found by who goes on
        longer = torch.cat([tokens[row : row + 1, -NEW - length :], prompt(5, seed=4)], dim=1)
        check(model, kv, longer, (length + NEW - 1) // BLOCK * BLOCK, bound=bound)


@pytest.mark.parametrize("name", SOME)
def test_beams_of_rows_with_padding(name, attached):
    model = known(name)
    ids, mask = padded()
    check(model, attached(model), ids, 0, 2 * (40 + 16), attention_mask=mask, num_beams=2)


def test_rows_whose_answer_hangs_on_the_padding_go_without_the_store(attached):
    """What a convolution adds to zeros is in RecurrentGemma's state behind them."""
    model = build("recurrent_gemma")
    assert kvclient.hf.self_test(model).padded, "its biases are 0"
    for key, value in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(value, std=0.5, generator=torch.Generator().manual_seed(1))
    assert not kvclient.hf.self_test(model).padded
    kv, (ids, mask) = attached(model), padded()
    with kv.bypass():
        plain, *_ = generate(model, ids, NEW, attention_mask=mask)
    for _ in range(2):
        tokens, *_ = generate(model, ids, NEW, attention_mask=mask)
        assert kv.last.bypassed == "padding" and torch.equal(tokens, plain)
    check(model, kv, ids[:1], 0, 40)


def test_outputs_of_the_prompt_go_without_the_store(attached):
    model = known("falcon_h1")
    kv, (ids, mask) = attached(model), padded()
    for options in ({}, {"attention_mask": mask}):
        asked = {"output_hidden_states": True, **options}
        with kv.bypass():
            plain, *_ = generate(model, ids, NEW, **asked)
        tokens, *_ = generate(model, ids, NEW, **asked)
        assert kv.last.bypassed == ("padding" if options else "prompt_outputs")
        assert torch.equal(tokens, plain)


def test_prompt_lookup_goes_without_the_store(attached):
    """Its loop has states recorded, to cut them back to what was accepted."""
    model, ids = known("lfm2"), prompt(45)
    kv = attached(model)
    with kv.bypass():
        plain = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for _ in range(2):
        said = model.generate(
            ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=3
        )
        assert torch.equal(said, plain) and kv.last.bypassed == "no_prefill"


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_a_cache_of_the_callers_is_served_while_it_is_empty(name, attached):
    """One with states alone tells no length. Filled, it is its caller's, as without the store."""
    model, ids = known(name), prompt(45)
    kv = attached(model)
    check(model, kv, ids, 0)

    def answers():
        cache = DynamicCache(config=model.config)
        tokens, logits, _ = generate(model, ids, NEW, **passing(cache, model))
        said.append((kv.last.reused_tokens, kv.last.bypassed))
        tokens = torch.cat([tokens, prompt(5, seed=9)], dim=1)
        more, more_logits, _ = generate(model, tokens, NEW, **passing(cache, model))
        said.append((kv.last.reused_tokens, kv.last.bypassed))
        return more, torch.cat([logits, more_logits])

    said = []
    with kv.bypass():
        plain, plain_logits = answers()
    del said[:]
    tokens, logits = answers()
    assert said == [(40, None), (0, "user_cache")]
    assert torch.equal(tokens, plain) and near(logits, plain_logits, 1e-4)


def test_int8_blocks_beside_states(client):
    """K and V are quantised, states are not: a hit's answer is near."""
    model, ids = known("qwen3_next"), prompt(99)
    with kvclient.hf.attach(model, client, block_tokens=32, codec="int8") as kv:
        _, plain, _ = generate(model, ids, 1)
        _, warm, _ = generate(model, ids, 1)
        assert kv.last.reused_tokens == 96
        assert kv.last.published_blocks == 0
        assert near(warm, plain, 0.05) and not torch.equal(warm, plain)


def test_a_state_of_other_weights_is_not_found(attached, client):
    ids = prompt(45)
    model = known("falcon_h1")
    kv = attached(model)
    generate(model, ids)
    other = known("falcon_h1", seed=7)
    with kvclient.hf.attach(other, client, block_tokens=BLOCK) as foreign:
        assert foreign.identity != kv.identity
        check(other, foreign, ids, 0)


CHILD = """
import sys, torch
sys.path.insert(0, {root!r})
import kvclient, kvclient.hf
from tests.hf.zoo import generate, known, prompt
model, whole = known({name!r}), prompt(100)
with kvclient.connect(dir={dir!r}) as client, kvclient.hf.attach(
    model, client, block_tokens=8, state_every_blocks={every}
) as kv:
    for blocks, seed in {asked!r}:
        ids = torch.cat([whole[:, : 8 * blocks], prompt(9, seed=seed)], dim=1) if seed else whole
        with kv.bypass():
            plain, *_ = generate(model, ids, 4)
        tokens, *_ = generate(model, ids, 4)
        print("reused", kv.last.reused_tokens // 8, torch.equal(tokens, plain))
"""
# Who has so many blocks between its states -> what it asks: how many blocks of the text, the seed of what is
# behind them (0: the whole text), and how many blocks are reused.
DENSE_FIRST = ((1, ((12, 0, 0),)), (5, ((12, 0, 12), (7, 11, 7), (3, 12, 3))))
SPARSE_FIRST = (
    (100, ((12, 0, 0), (12, 3, 12))),  # a state behind the whole text only
    (1, ((12, 0, 12), (7, 11, 0), (7, 12, 7), (3, 13, 3), (10, 14, 7), (10, 15, 10))),
    (100, ((5, 21, 5), (10, 22, 10), (9, 23, 9))),  # what it left out itself
)


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [DENSE_FIRST, SPARSE_FIRST], ids=["dense first", "sparse first"])
def test_two_processes_on_one_daemon_with_different_distances(name, processes, daemon):
    served = daemon(memory="16MiB")
    for every, steps in processes:
        asked = [step[:2] for step in steps]
        code = CHILD.format(root=str(ROOT), name=name, dir=str(served.dir), every=every, asked=asked)
        done = run_warm([sys.executable, "-c", code], cwd=ROOT, timeout=240, check=True)
        said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("reused")]
        assert said == [[str(reused), "True"] for _, _, reused in steps]


def test_a_token_alone_goes_on_with_no_other_call(attached):
    """RecurrentGemma's blocks keep the states of the call before, and would take them for this one's."""
    alone = prompt(1, seed=3)
    _, wanted, _ = generate(build("recurrent_gemma"), alone, NEW)
    model = build("recurrent_gemma")
    kv = attached(model, self_test=False)
    generate(model, prompt(20, seed=1), NEW)
    answer, logits, _ = generate(model, alone, NEW)
    assert kv.last.bypassed is None and near(logits, wanted, 1e-4)
    longer = torch.cat([answer, prompt(3, seed=4)], dim=1)  # what was published of it
    _, wanted, _ = generate(build("recurrent_gemma"), longer, NEW)
    _, logits, _ = generate(model, longer, NEW)
    assert kv.last.reused_tokens and near(logits, wanted, 1e-4)
