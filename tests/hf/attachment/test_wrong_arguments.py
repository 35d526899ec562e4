"""Proves that a wrong argument of a public call is an InvalidArgument that names it and the value, at once.

Method: each is given what it does not take: other types, numbers that are not whole, NaN, out of bounds. What
would otherwise raise later, from inside a model's generate(), or be taken for something else, counts too.
"""

import math

import numpy as np
import pytest
import torch

import kvclient.hf
from kvclient import kernels
from kvclient.blocks import plan
from kvclient.blocks.chunker import Chunker
from kvclient.blocks.codec import Kivi
from kvclient.errors import InvalidArgument
from kvclient.hf import Repair, Window, attention
from tests.hf.zoo import build, generate, prompt

NO_NUMBERS = ("1", None, math.nan, [1])
NOT_WHOLE = (1.5, -1, True, *NO_NUMBERS)
WHOLE_IN = {
    Repair: (
        "behind_tokens", "scan_tokens", "seam_tokens", "front_tokens", "sink_tokens", "recency_tokens",
        "min_tokens",
    ),
    Window: ("recent", "older", "sink_tokens"),
    Kivi: ("bits", "group"),
    Chunker: ("block_tokens",),
}
CASES = [(made, name, value) for made, names in WHOLE_IN.items() for name in names for value in NOT_WHOLE]
CASES += [(Repair, "ratio", value) for value in (-0.1, 1.1, *NO_NUMBERS)]
CASES += [(Repair, "attended_ratio", value) for value in (-0.1, 1.1, "1", math.nan, [1])]
CASES += [(Repair, "check_layer", value) for value in (1.5, -1, "1", math.nan)]
CASES += [(Repair, "method", value) for value in (5, None, "x")]
CASES += [(Kivi, "bits", 8.0), (Kivi, "group", 32.0), (Window, "codec", "int8"), (Window, "codec", None)]


@pytest.mark.parametrize(("made", "name", "value"), CASES)
def test_what_is_made_of_numbers(made, name, value):
    with pytest.raises(InvalidArgument) as refused:
        made(**{name: value})
    assert f"{name}={value!r}" in str(refused.value)


ATTACH = [("block_tokens", value) for value in (0, 1 << 40, *NOT_WHOLE)]
ATTACH += [("priority", value) for value in (101, *NOT_WHOLE)]
ATTACH += [("overlap_tokens", value) for value in NOT_WHOLE]
ATTACH += [("ttl_s", value) for value in (0, -1, "1", math.nan)]
ATTACH += [("follow_timeout_s", value) for value in (0, 3601, *NO_NUMBERS)]
ATTACH += [("salt", 5), ("salt", ["a"]), ("repair", 5), ("repair", True), ("repair", "x"), ("codec", 5)]
ATTACH += [("codec", "int2"), ("chunker", 5), ("chunker", None), ("in_place", "yes")]
ATTACH += [("weights_digest", value) for value in (b"x", "x" * 32, 5)]


def test_attach(client):
    model = build("llama", layers=1)
    for name, value in ATTACH:
        with pytest.raises(InvalidArgument) as refused:
            kvclient.hf.attach(model, client, self_test=False, **{name: value})
        said = str(refused.value)
        assert f"{'method' if name == 'repair' else name}={value!r}" in said
        assert "generate" not in model.__dict__ and model.config._attn_implementation == "sdpa"
    with pytest.raises(InvalidArgument, match="needs tokenizer="):
        kvclient.hf.attach(model, client, chunker="sentence", tokenizer=5)
    for value in (5, True, "x", ["cpu_avx2"]):
        with pytest.raises(InvalidArgument, match="backend="):
            attention.install(model, value)
    with pytest.raises(InvalidArgument, match="no transformers model"):
        attention.install("x")


@pytest.mark.parametrize("no_client", [None, "default", kvclient, kvclient.InMemoryClient])
def test_what_is_no_client_is_told_from_one(no_client, client):
    model = build("llama", layers=1)
    with pytest.raises(InvalidArgument, match=r"client=.*kvclient\.connect\(\)"):
        kvclient.hf.attach(model, no_client, self_test=False)
    assert "generate" not in model.__dict__ and model.config._attn_implementation == "sdpa"
    with pytest.raises(kvclient.hf.Refused, match="generate"):
        kvclient.hf.attach(no_client, client)
    client.close()
    with pytest.raises(kvclient.Closed):
        kvclient.hf.attach(model, client, self_test=False)
    assert "generate" not in model.__dict__ and model.config._attn_implementation == "sdpa"


def test_limited(client):
    """A count from the end would publish what was to stay."""
    with kvclient.hf.attach(build("llama", layers=1), client, self_test=False) as kv:
        for value in {1 << 40, *NOT_WHOLE[:-1]} - {None}:
            with pytest.raises(InvalidArgument) as refused, kv.limited(publish_tokens=value):
                pass
            assert f"publish_tokens={value!r}" in str(refused.value)


def test_publish(client):
    """Of no call with the store it was 0 blocks; of two rows the first was kept, padding and all."""
    model, ids = build("llama", layers=1), prompt(20)
    with kvclient.hf.attach(model, client, block_tokens=8, self_test=False) as kv:
        with kv.bypass():
            *_, without = generate(model, ids, 1)
        for wrong in (without, type(without)(), without.layers, None, "x"):
            with pytest.raises(InvalidArgument, match=f"cache={type(wrong).__name__}; "):
                kv.publish(ids[0].tolist(), wrong)
        with kv.bypass(read=False), kv.limited(publish_tokens=0):
            *_, rows = generate(model, torch.cat([ids, ids]), 1)
            *_, row = generate(model, ids, 1)
        with pytest.raises(InvalidArgument, match="2 rows"):
            kv.publish(ids[0].tolist(), rows)
        assert kv.publish(ids[0].tolist(), row) == 2 and kv.publish(ids[0].tolist(), row) == 0


def test_a_compiled_model_is_the_one_inside(client):
    model = build("llama", layers=1)
    with pytest.raises(InvalidArgument, match=r"around this Llama.*the one inside.*model\.compile\(\)"):
        kvclient.hf.attach(torch.compile(model, backend="eager"), client)


@pytest.mark.slow  # imports the compiler; test_backends.py compiles a whole model
def test_a_model_compiled_in_place_is_served(client):
    model = build("llama", layers=1)
    model.compile(backend="eager")
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
        first, second = (generate(model, prompt(40), 2)[0] for _ in range(2))
        assert torch.equal(first, second) and kv.last.reused_tokens == 32


PLAN = [(name, value) for name in ("block_tokens", "min_tokens") for value in (0, *NOT_WHOLE)]
PLAN += [("exact_tokens", value) for value in (-1, 62, 1.5, "1", math.nan)]
PLAN += [("chunker", "fixed"), ("chunker", 5)]


def test_plan(client):
    for name, value in PLAN:
        with pytest.raises(InvalidArgument) as refused:
            plan(client, bytes(32), list(range(61)), **{name: value})
        assert f"{name}={value!r}" in str(refused.value)
    for tokens in ([1.5], "abc", [[1, 2]], [1 << 31], np.array([1 << 40]), [-(1 << 31) - 1]):
        with pytest.raises(InvalidArgument, match="token"):
            plan(client, bytes(32), tokens)
    for tokens in ([], (1, 2), np.arange(3, dtype=np.uint8), torch.arange(3)):
        assert len(plan(client, bytes(32), tokens)) == (len(tokens) > 0)


def test_kernels():
    q, position = np.zeros((1, 2, 1, 8), np.float32), np.zeros((1, 1), np.int64)
    keys = np.zeros((2, 4, 8), np.float32)
    block = kernels.segment(keys, keys, np.int64(0))
    wrong = [(name, value) for name in ("window", "threads", "rotary_dim") for value in (1 << 32, *NOT_WHOLE)]
    for name, value in [*wrong, *(("softcap", value) for value in (-1.0, *NO_NUMBERS))]:
        with pytest.raises(InvalidArgument) as refused:
            kernels.attend(q, position, [[block]], 1.0, **{name: value})
        assert f"{name}={value!r}" in str(refused.value)
    for value in NO_NUMBERS:
        with pytest.raises(InvalidArgument, match="scale="):
            kernels.attend(q, position, [[block]], value)
        with pytest.raises(InvalidArgument, match="delta="):
            kernels.turn(np.ones(4), value)
    for numbers in ({"base_position": 1.5}, {"first": 1.5}, {"first": 5}, {"tokens": 1.5}, {"tokens": 5}):
        with pytest.raises(InvalidArgument, match=next(iter(numbers)).removeprefix("base_")):
            kernels.segment(keys, keys, **{"base_position": 0, **numbers})
    for numbers in ((8.0, 0), ("8", 0), (8, 32.0), (8, None)):
        with pytest.raises(InvalidArgument, match=r"bits=|group="):
            kernels.quantise(np.zeros((2, 32, 8), np.float32), *numbers)
