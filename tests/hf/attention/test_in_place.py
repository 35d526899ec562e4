"""Proves attach(in_place=True): attention reads the store's blocks and says what the model says.

Method: tiny random models of every architecture against plain generate(): equal tokens in fp32 and logits to
rounding, cold and warm, alone and in padded rows. That nothing was copied is seen in memory: the segments
point into the blocks, the layers hold the tail only. What needs one tensor (reading keys, cropping, beams)
gets it and is counted; what would be silently wrong (a model that changes its keys after the cache) raises.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient import kernels
from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attention import backends
from kvclient.hf.cache.in_place import InPlaceLayer
from tests.hf.zoo import SERVED, generate, known, near, prompt
from tests.kernels.cpu_paths import provide

BLOCK = 16
OWN_ATTENTION = ("falcon", "falcon_alibi", "bloom", "mpt")
NAMES = [name for name in SERVED if name not in OWN_ATTENTION]

pytestmark = pytest.mark.skipif(
    all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")),
    reason="no CPU kernels here",
)


def attached(model, client, **options):
    return kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=True, **options)


@pytest.mark.matrix(1, "llama")
@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_generation(name, client):
    model, ids = known(name), prompt(61)
    rows = torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :21] = mask[1, :21] = 0
    plain, logits, _ = generate(model, ids)
    plain_rows, row_logits, _ = generate(model, rows, attention_mask=mask)
    with attached(model, client) as kv:
        assert kv.backend.startswith("cpu_")
        for reused in (0, 48):
            tokens, found, _ = generate(model, ids)
            assert kv.last.reused_tokens == reused
            assert torch.equal(tokens, plain)
            assert near(found, logits)
        for reused in (21, 48 + 27):
            tokens, found, _ = generate(model, rows, attention_mask=mask)
            assert kv.last.reused_tokens == reused or kv.last.bypassed == "padding"
            assert torch.equal(tokens, plain_rows)
            assert near(found, row_logits)
    assert torch.equal(generate(model, ids)[1], logits)  # its own attention is back


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "phi3"])
def test_bfloat16_to_rounding(name, client):
    model, ids = known(name, torch.bfloat16), prompt(61)
    _, logits, _ = generate(model, ids, 1)
    with attached(model, client):
        for _ in range(2):
            assert near(generate(model, ids, 1)[1], logits, 5e-2)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_around_the_boundaries_of_blocks(length, client):
    model, ids = known("llama"), prompt(length)
    plain, logits, _ = generate(model, ids)
    with attached(model, client) as kv:
        for _ in range(2):
            tokens, found, cache = generate(model, ids)
            assert torch.equal(tokens, plain)
            assert near(found, logits)
            assert cache.get_seq_length() == length + 7
        assert kv.last.reused_tokens == min(length // BLOCK * BLOCK, length - 1)


def test_no_dense_cache_is_built(client, left):
    model, ids = known("llama"), prompt(61)
    with attached(model, client) as kv:
        generate(model, ids)
        _, _, cache = generate(model, ids)
        chain = kvclient.chain(kv.identity, ids[0].tolist(), block_tokens=BLOCK)
        with client.get(chain) as blocks:
            for number, layer in enumerate(cache.layers):
                assert isinstance(layer, InPlaceLayer)
                assert layer.origin == 48
                assert layer.storage.shape[3] < 48  # the 13 tokens of the tail and what was generated
                assert [part[:2] for part in layer._prefix] == [(0, 0), (0, 16), (0, 32)]
                for block, (_, _, kept, count, _) in zip(blocks, layer._prefix, strict=True):
                    for array, stored in zip(kept, block.layer(number), strict=True):
                        assert array.ctypes.data == stored.ctypes.data
                        assert (array.shape, count) == (stored.shape, BLOCK)
    assert left() == {}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantised_blocks_are_read_as_they_are(codec, client, left):
    """In place and copied out, the same codes stand for the same numbers."""
    model, ids = known("llama"), prompt(101)
    attention.install(model)
    for in_place in (False, True):
        options = {"block_tokens": 32, "codec": codec, "in_place": in_place}
        with kvclient.hf.attach(model, client, **options) as kv:
            _, found, cache = generate(model, ids, 1)
            _, found, cache = generate(model, ids, 1)
            assert kv.last.reused_tokens == 96
            if not in_place:
                wanted = found
    assert near(found, wanted, 1e-2)  # integers of 16 bits against fp32, through three layers
    for layer in cache.layers:  # the first tokens and the last block are stored in full beside them
        sinks, *rest, last = layer._prefix
        assert [isinstance(part.block[0], kernels.Quantised) for part in (sinks, last)] == [False, False]
        assert all(isinstance(part.block[0], kernels.Quantised) for part in rest)
        assert [part.tokens for part in (sinks, *rest, last)] == [4, 28, 32, 32]
    assert left() == {}


def test_reuse_inside_a_prompt_goes_on_under_the_kernels(client, left):
    """From a dense cache, counted; the kernels take rows that do not follow each other by their columns."""
    model = known("llama")
    document, ids = prompt(64, seed=4), prompt(90, seed=5)
    ids[0, 11:75] = document
    answers = []
    for in_place in (False, True):
        options = {"block_tokens": BLOCK, "repair": "selective", "in_place": in_place}
        with kvclient.hf.attach(model, client, **options) as kv:
            generate(model, document)
            answers.append(generate(model, ids, 4))
            assert kv.last.approximate_tokens >= 32
    (plain, logits, _), (tokens, found, _) = answers
    assert torch.equal(tokens, plain)
    assert near(found, logits, 1e-4)
    assert left() == {"inside": 1}


def test_a_compiled_model_reads_in_place_too(client, left):
    """What a cache does is not for a graph: torch.compile leaves it out, and compiles what is between."""
    model, ids = known("llama", layers=1), prompt(61)
    plain, logits, _ = generate(model, ids, 2)
    with attached(model, client) as kv:
        model.model.layers[0].compile(backend="eager")
        for reused in (0, 48):
            tokens, found, cache = generate(model, ids, 2)
            assert kv.last.reused_tokens == reused
            assert torch.equal(tokens, plain) and near(found, logits)
        assert cache.layers[0].origin == 48 and len(cache.layers[0]._prefix) == 3
    assert left() == {}


def test_what_is_read_is_what_lies_there(client):
    """Other bytes in the blocks give other logits: the blocks are read at every step, not once."""
    model, ids = known("llama"), prompt(61)
    with attached(model, client):
        generate(model, ids)
        _, _, cache = generate(model, ids, 1)
        following = torch.tensor([[7]])
        with torch.no_grad():
            before = model(following, past_key_values=copy.deepcopy(cache)).logits
            for layer in cache.layers:
                layer._prefix = [
                    (row, start, (k.copy() + np.float32(0.5), v), n, first)
                    for row, start, (k, v), n, first in layer._prefix
                ]
                layer._call = None
            after = model(following, past_key_values=cache).logits
    assert not torch.allclose(before, after, atol=1e-3)


def test_generated_text_is_published_and_reused(client):
    model, ids = known("llama"), prompt(20)
    with attached(model, client) as kv:
        tokens, *_ = generate(model, ids, 60)
        assert kv.last.published_blocks == 79 // BLOCK
        tokens, *_ = generate(model, ids, 60)  # its tail starts behind the first block
        longer = torch.cat([tokens, prompt(3, seed=5)], dim=1)
        warm, *_ = generate(model, longer)
        assert kv.last.reused_tokens == 79 // BLOCK * BLOCK
    plain, *_ = generate(model, longer)
    assert torch.equal(warm, plain)


def test_blocks_written_in_place_serve_a_dense_reader(client):
    """The same blocks under one backend, whoever computed them; another attention is another identity."""
    model = known("llama")
    attention.install(model)
    for first, then in ((True, False), (False, True)):
        ids = prompt(70, seed=3 + first)
        plain, *_ = generate(model, ids)
        for in_place, reused in ((first, 0), (then, 64)):
            with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=in_place) as kv:
                tokens, *_ = generate(model, ids)
                assert kv.last.reused_tokens == reused
                assert torch.equal(tokens, plain)
    attention.uninstall(model)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv:
        generate(model, ids)
        assert kv.last.reused_tokens == 0


def test_reading_the_keys_of_a_cache_makes_it_dense_and_is_counted(client, left):
    model, ids = known("llama"), prompt(61)
    _, _, dense_cache = generate(model, ids)
    with attached(model, client):
        generate(model, ids)
        _, _, cache = generate(model, ids)
    for layer, dense_layer in zip(cache.layers, dense_cache.layers, strict=True):
        assert near(layer.keys, dense_layer.keys)
        assert near(layer.values, dense_layer.values)
    assert left() == {"read": 3}
    following = torch.tensor([[7]])
    with torch.no_grad():
        assert near(
            model(following, past_key_values=cache).logits,
            model(following, past_key_values=dense_cache).logits,
        )


def test_a_returned_cache_goes_on_alone(client, left):
    """After the call, its blocks deleted: they stay as they are until the cache is gone."""
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids, 12)
    with attached(model, client) as kv:
        generate(model, ids, 4)
        tokens, _, cache = generate(model, ids, 4)
        client.delete(kvclient.chain(kv.identity, ids[0].tolist(), block_tokens=BLOCK))
        rest, *_ = generate(model, tokens, 8, past_key_values=cache)
        assert (kv.last.bypassed, kv.last.read_bypassed) == (None, "user_cache")
    assert torch.equal(rest, plain)
    assert left() == {}


OTHERWISE = {
    "detached": lambda kv, model, cache: kv.detach(),
    "switched": lambda kv, model, cache: model.set_attn_implementation("eager"),
    "copied": lambda kv, model, cache: kv.detach() or copy.deepcopy(cache),
    "from a file": lambda kv, model, cache: kv.detach() or pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layers", [1, 3])  # with one, nothing notices that a handle did not come back
@pytest.mark.parametrize("how", OTHERWISE)
def test_a_returned_cache_goes_on_under_another_attention(how, layers, paged, client, left):
    """Which sees the tail only, unless the layers notice: alone without a mask, and with rows of a mask."""
    if paged and how == "from a file":
        pytest.skip("pages lie in a pool, which no file holds")
    model, ids = known("llama", layers=layers), prompt(61)
    rows = torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones((2, 65), dtype=torch.int64)
    rows[1, :21] = mask[1, :21] = 0
    plain, logits, _ = generate(model, ids, 12)
    plain_rows, row_logits, _ = generate(model, rows, 12, attention_mask=mask[:, :61])
    with attached(model, client, paged=paged) as kv:
        generate(model, ids, 4)
        tokens, _, cache = generate(model, ids, 4)
        row_tokens, _, row_cache = generate(model, rows, 4, attention_mask=mask[:, :61])
        assert kv.last.reused_tokens > 0
        cache, row_cache = (OTHERWISE[how](kv, model, held) or held for held in (cache, row_cache))
        assert left() == {}
        rest, found, _ = generate(model, tokens, 8, past_key_values=cache)
        assert torch.equal(rest, plain) and near(found, logits[4:])
        rest, found, _ = generate(model, row_tokens, 8, attention_mask=mask, past_key_values=row_cache)
        assert torch.equal(rest, plain_rows) and near(found, row_logits[4:])
    # The call itself counts too where it finds the model switched.
    wanted = {"detached": 2 * layers, "switched": 2 * layers + 1}.get(how, 0)
    assert left().pop("switched", 0) == wanted


def test_a_copied_cache_has_memory_of_its_own(client):
    model, ids = known("llama"), prompt(61)
    with attached(model, client):
        generate(model, ids)
        _, _, cache = generate(model, ids, 1)
        twin = copy.deepcopy(cache)
        eight, nine = (generate(model, torch.cat([ids, prompt(9, seed=s)], 1), 4, past_key_values=c)[0]
                      for s, c in ((8, cache), (9, twin)))  # fmt: skip
    for seed, tokens in ((8, eight), (9, nine)):
        assert torch.equal(tokens, generate(model, torch.cat([ids, prompt(9, seed=seed)], 1), 4)[0])


def test_beams_and_crops_become_dense_and_are_counted(client, left):
    model, ids = known("llama"), prompt(61)
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with attached(model, client):
        model.generate(ids, **options)
        assert torch.equal(model.generate(ids, **options), plain)
        _, _, cache = generate(model, ids)
        cache.layers[0].become_dense("crop")
        assert cache.layers[0].keys.shape[2] == 68
    assert left().keys() == {"rows", "crop"}


def test_a_model_that_changes_its_keys_after_the_cache_is_found_out(client, monkeypatch):
    """The trap of latent attention: the handle is lost, and attention would see the new tokens only."""
    model = known("llama")
    registered = attention.registered
    original = registered.attention

    def changed(backend, module, query, key, value, *args, **kwargs):
        return original(backend, module, query, key * 1.0, value, *args, **kwargs)

    monkeypatch.setattr(registered, "attention", changed)
    registered.register.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="changed the keys of layer 0"), attached(model, client):
            generate(model, prompt(40))
    finally:
        monkeypatch.undo()
        registered.register.cache_clear()
        registered.register(backends.choose(torch.device("cpu"), torch.float32, 8))
    assert attention.installed(model) is None


def test_attention_that_is_not_ours_is_found_out(client, monkeypatch):
    """Exchanged behind the store's back: the layer's handle is never asked about."""
    model, ids = known("llama"), prompt(40)
    with attached(model, client) as kv:
        generate(model, ids)
        table = transformers.AttentionInterface._global_mapping
        monkeypatch.setitem(table, model.config._attn_implementation, table["sdpa"])
        with pytest.raises(RuntimeError, match="none of the registered functions"):
            generate(model, ids)
        assert kv.last.reused_tokens == 0


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_their_own_attention_are_refused(name, client):
    model = known(name)
    with pytest.raises(InvalidArgument, match="its own attention"):
        attached(model, client)
    assert "generate" not in model.__dict__


def test_torch_cannot_read_in_place(client, monkeypatch):
    monkeypatch.setenv(backends.ENVIRONMENT, "torch")
    with pytest.raises(InvalidArgument, match="torch cannot read"):
        attached(known("llama"), client)


BACKENDS = [
    pytest.param(name, backend, marks=[] if name in ("llama", "gpt_neox") else pytest.mark.slow)
    for name in NAMES
    for backend in ("cpu_avx512", "cpu_amx", "cpu_avx2")
]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_each_backend_says_what_the_model_says(name, backend, client, left, monkeypatch):
    """By name, on every architecture: cold and warm, and a block of int8 as its dense form."""
    if backend == "cpu_amx":
        provide("amx", monkeypatch)
    if reason := attention.available_backends()[backend]:
        pytest.skip(reason)
    monkeypatch.setenv(backends.ENVIRONMENT, backend)
    model, ids = known(name), prompt(101)
    plain, logits, _ = generate(model, ids, 4)
    with attached(model, client) as kv:
        assert kv.backend == backend
        for reused in (0, 96):
            tokens, found, _ = generate(model, ids, 4)
            assert kv.last.reused_tokens == reused
            assert torch.equal(tokens, plain) and near(found, logits)
    with kvclient.hf.attach(model, client, block_tokens=32, codec="int8", in_place=True) as kv:
        for _ in range(2):
            found = generate(model, ids, 1)[1]
        assert kv.last.reused_tokens == 96 and near(found, logits[:1], 5e-2)
    assert set(left()) <= {"mask"}


def test_an_installed_backend_is_kept(client):
    model = known("llama")
    attention.install(model, "cpu_avx2")
    with attached(model, client) as kv:
        assert kv.backend == "cpu_avx2"
    assert attention.installed(model) == "cpu_avx2"
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert kv.backend == "cpu_avx2"
