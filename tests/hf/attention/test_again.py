"""Goal: a call of attention like the last one is not looked at again, and one that is not like it is: what it
answers is what the call says, whatever was asked before.

Method: calls one after the other in random order, by the registered function over dense tensors and over
layers that are read in place, against torch's reference; what is counted is who reads the arguments.
"""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient.hf.attention import backends, dense, registered
from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.cache.layer import Shape

HEADS, KV_HEADS, SIZE = 6, 2, 16
BACKEND = backends.choose(torch.device("cpu"), torch.float32, SIZE)
attention = functools.partial(registered.attention, BACKEND)

pytestmark = pytest.mark.skipif(BACKEND.path is None, reason="no CPU kernels here")


class Module(torch.nn.Module):
    is_causal = True


def tensors(tokens, seed, heads=KV_HEADS, dtype=torch.float32, gaps=False):
    generator = torch.Generator().manual_seed(seed)
    width = 2 * SIZE if gaps else SIZE
    made = torch.randn(1, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)
    return made[..., ::2] if gaps else made


def expected(query, key, value, scaling=None, window=None, softcap=None, sinks=None):
    key, value = (side.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for side in (key, value))
    scale = SIZE**-0.5 if scaling is None else float(scaling)
    score = query.float() @ key.transpose(2, 3) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    rows, keys = score.shape[2:]
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    score = score.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(1, HEADS, rows, 1)], dim=-1)
    weight = score.softmax(-1)[..., :keys]
    return (weight @ value).transpose(1, 2)


def near(answer, wanted, dtype=torch.float32):
    torch.testing.assert_close(answer.float(), wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)


@pytest.fixture
def read(monkeypatch):
    """How often a call's arguments were read."""
    seen, original = [], registered._read
    monkeypatch.setattr(registered, "_read", lambda *args: seen.append(1) or original(*args))
    return seen


def layer(dtype=torch.float32, heads=KV_HEADS, **limits):
    shape = Shape(1, heads, SIZE, dtype, torch.device("cpu"), 24, **limits)
    return InPlaceLayer(0, shape, None, None, None, [0], lambda _reason: None, lambda: True)


@torch.no_grad()
def test_the_layers_of_a_step_are_read_once(read):
    module = Module()
    for step in range(3):
        keys = 9 + step
        for number in range(4):
            sides = tensors(keys, number), tensors(keys, 50 + number)
            query = tensors(1, 99, HEADS)
            near(attention(module, query, *sides, None)[0], expected(query, *sides))
    assert len(read) == 3  # at each length


@torch.no_grad()
def test_the_steps_of_a_layer_in_place_are_read_once(read):
    module, kept, every = Module(), layer(), []
    for step in range(6):
        tokens = 5 if step == 0 else 1
        every.append((tensors(tokens, step), tensors(tokens, 50 + step)))
        query = tensors(tokens, 99 + step, HEADS)
        handed = kept.update(*every[-1])
        wanted = expected(query, *(torch.cat(sides, dim=2) for sides in zip(*every, strict=True)))
        near(attention(module, query, *handed, None)[0], wanted)
    assert len(read) == 2  # the prompt, and the first token


CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "tokens": st.sampled_from([1, 1, 1, 3]), "keys": st.sampled_from([7, 7, 8]),
            "scaling": st.sampled_from([None, 0.25, 0.5]), "window": st.sampled_from([None, 0, 3]),
            "softcap": st.sampled_from([None, 2.0]), "sinks": st.booleans(), "gaps": st.booleans(),
            "dtype": st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
            "in_place": st.booleans(), "turned": st.booleans(),
        }
    ),
    min_size=2, max_size=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(CALLS)
@torch.no_grad()
def test_calls_in_any_order_answer_what_they_say(calls):
    module, kept, held = Module(), {}, {}
    for number, call in enumerate(calls):
        dtype, terms = call["dtype"], {name: call[name] for name in ("scaling", "window", "softcap")}
        sinks = torch.linspace(-1, 1, HEADS) if call["sinks"] else None
        count = call["tokens"] if call["in_place"] else call["keys"]
        sides = [tensors(count, 2 * number + side, dtype=dtype, gaps=call["gaps"]) for side in (0, 1)]
        query = tensors(call["tokens"], 99 + number, HEADS, dtype)
        query = query.contiguous() if call["turned"] else query
        handed = sides
        if call["in_place"]:
            if dtype not in kept:
                kept[dtype], held[dtype] = layer(dtype), []
            handed = kept[dtype].update(*sides)
            held[dtype].append(sides)
            sides = [torch.cat(side, dim=2) for side in zip(*held[dtype], strict=True)]
        asked = {"scaling": terms["scaling"], "sliding_window": terms["window"], "softcap": terms["softcap"]}
        answer, _ = attention(module, query, *handed, None, s_aux=sinks, **asked)
        near(answer, expected(query, *sides, **terms, sinks=sinks), dtype)


@torch.no_grad()
def test_a_scale_that_can_change_is_read_each_time():
    scale, module, kept, every = torch.tensor(0.5), Module(), layer(), []
    query = tensors(1, 1, HEADS)
    for number, value in enumerate((0.5, 0.5, 0.5, 0.25)):
        scale.fill_(value)
        sides = tensors(4, 2), tensors(4, 3)
        near(attention(module, query, *sides, None, scaling=scale)[0], expected(query, *sides, value))
        every.append((tensors(1, 20 + number), tensors(1, 40 + number)))
        whole = [torch.cat(side, dim=2) for side in zip(*every, strict=True)]
        answer, _ = attention(module, query, *kept.update(*every[-1]), None, scaling=scale)
        near(answer, expected(query, *whole, value))


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2])
def test_what_another_call_said_is_not_kept(tokens):
    """Sinks, and queries that lie otherwise, between calls of a layer that has seen both."""
    module, kept, every = Module(), layer(), []
    for number, how in enumerate(("", "", "sinks", "", "turned", "", "turned")):
        every.append((tensors(tokens, 20 + number), tensors(tokens, 40 + number)))
        query = tensors(tokens, 60 + number, HEADS)
        query = query.contiguous() if how == "turned" else query
        sinks = torch.full((HEADS,), 3.0) if how == "sinks" else None
        answer, _ = attention(module, query, *kept.update(*every[-1]), None, s_aux=sinks)
        whole = [torch.cat(side, dim=2) for side in zip(*every, strict=True)]
        near(answer, expected(query, *whole, sinks=sinks))


@torch.no_grad()
def test_a_handle_that_was_lost_still_raises():
    module, kept, other = Module(), layer(), layer()
    query, sides = tensors(1, 1, HEADS), lambda: (tensors(1, 2), tensors(1, 3))
    for _ in range(3):
        attention(module, query, *kept.update(*sides()), None)
        attention(module, query, *other.update(*sides()), None)
        attention(module, query, *sides(), None)
    keys, values = kept.update(*sides())
    with pytest.raises(RuntimeError, match="changed the keys of layer 0"):
        attention(module, query, keys + 0, values, None)
    kept.update(*sides())
    with pytest.raises(RuntimeError, match="changed the keys"):
        attention(module, query, *sides(), None)
    mine = kept.update(*sides())
    other._told = kept._told
    theirs = tensors(1, 2)
    theirs._kvclient_layer = other
    with pytest.raises(RuntimeError, match="changed the keys"):
        attention(module, query, theirs, mine[1], None)


@torch.no_grad()
@pytest.mark.parametrize("how", ["wider", "gaps", "dtype", "heads", "full", "copied", "cropped", "told"])
def test_a_token_that_is_written_otherwise_is_written_right(how):
    """Beside what is written by addresses: each as the layer has it once it is one tensor."""
    heads = 12 if how == "heads" else KV_HEADS
    kept, told, every = layer(heads=heads), [], []

    def grow(*sides):
        query = tensors(sides[0].shape[2], 3, 2 * heads)
        attention(Module(), query, *kept.update(*sides), None)
        every.append(sides)

    grow(tensors(5, 1, heads), tensors(5, 2, heads))
    for number in range(30 if how == "full" else 3):
        if how == "told":
            kept.written = lambda *args: told.append(args[1:3])
        before = copy.deepcopy(kept) if how == "copied" else None
        if how == "cropped":
            kept.crop(-1)
            every[-1] = tuple(side[:, :, :-1] for side in every[-1])
        if how == "wider":
            grow(tensors(2, 10 + number, heads)[:, :, :1], tensors(2, 11 + number, heads)[:, :, 1:])
        else:
            grow(*(tensors(1, 10 + number + side, heads, gaps=how == "gaps") for side in (0, 1)))
        assert before is None or before.get_seq_length() == kept.get_seq_length() - 1
    if how == "dtype":
        with pytest.raises(RuntimeError, match="stored"):
            kept.update(*(side.double() for side in every[-1]))
    for ours, side in ((kept.keys, 0), (kept.values, 1)):
        assert torch.equal(ours, torch.cat([sides[side] for sides in every], dim=2))
    assert len(told) == (3 if how == "told" else 0)


def test_gradients_are_not_lost():
    module, query = Module(), tensors(1, 1, HEADS)
    sides = tensors(4, 2), tensors(4, 3)
    with torch.no_grad():
        for _ in range(2):
            attention(module, query, *sides, None)
        assert dense.again(query, *sides, (BACKEND.path, None, None, None, True)) is not None
    assert attention(module, query.requires_grad_(), *sides, None)[0].requires_grad
