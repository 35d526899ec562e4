"""Proves that a step of several requests on a GPU says of each what it says alone, in one launch a layer.

Method: a tiny random model, prompts of different lengths, cold and warm, plain and quantised blocks; several
steps, in which requests join and leave and one feeds several tokens, against the model's own pass over each
text. Launches and tables are counted. On the emulation the layers and tables are the same.
"""

import functools

import pytest
import torch

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")

import kvclient.hf
from kvclient.hf.cache import ragged_device
from kvclient.hf.cache.ragged import step
from kvclient.hf.cache.ragged_device import RaggedDeviceLayer
from tests.gpu.models.bound import bound, model_on
from tests.hf.zoo import generate, near, prompt


@pytest.fixture
def launches(monkeypatch):
    count = []
    original = ragged_device.attend
    monkeypatch.setattr(
        ragged_device, "attend", lambda *args, **options: count.append(1) or original(*args, **options)
    )
    return count


@pytest.fixture
def tables(monkeypatch):
    made = []
    original = ragged_device.Table
    monkeypatch.setattr(ragged_device, "Table", lambda *args: made.append(1) or original(*args))
    return made


def started(model, kv, ids):
    """(its text so far, its cache, which has all but the last token)."""
    tokens, _, cache = generate(model, ids, 1)
    return tokens[0].tolist(), cache


@torch.no_grad()
def alone(model, kv, text):
    with kv.bypass():
        ids = torch.tensor([text], device=model.device)
        return type(model).forward(model, input_ids=ids, use_cache=False).logits[0]


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("warm", [False, True])
def test_each_says_what_it_says_alone(place, client, launches, tables, codec, warm):
    model = model_on(place, "llama")
    prompts = [prompt(n, seed=n).to(place) for n in (101, 37, 70)]
    layers = model.config.num_hidden_layers
    kept = {}
    make = functools.partial(RaggedDeviceLayer, tables=kept)
    options = {"block_tokens": 32, "codec": codec, "self_test": place.type != "cpu", "in_place": True}
    limits = {"bound": 3e-2} if codec else bound(place)
    with kvclient.hf.attach(model, client, **options) as kv:
        for ids in prompts if warm else []:
            generate(model, ids, 1)
        texts, caches = map(list, zip(*(started(model, kv, ids) for ids in prompts), strict=True))
        launches.clear()
        tables.clear()
        fed = [[[texts[i][-1]] for i in range(3)], [[5], [6], [7]], [[8, 9, 10], [11], [12]]]
        fed += [[[13], [14]], [[15], [16]], [[17], [18]]]
        for number, tokens in enumerate(fed):
            if number:
                for text, more in zip(texts, tokens, strict=False):
                    text += more
            used = caches[: len(tokens)]
            found = step(model, tokens, used, None, make)
            for text, more, logits in zip(texts, tokens, found, strict=False):
                wanted = alone(model, kv, text)[-len(more) :]
                assert logits.shape == wanted.shape and near(logits, wanted, **limits)
        assert len(launches) == 6 * layers  # the one with several tokens attends by itself
        # Of three; of their tails that grew; of the last two; of the first two. A short tail grows once more.
        assert len(tables) == (5 if warm else 4) * layers
        for text, cache in zip(texts, caches, strict=True):
            assert cache.get_seq_length() == len(text)
            assert all(layer.in_place for layer in cache.layers)


def test_a_request_that_is_gone_is_not_kept_alive(place, client):
    model = model_on(place, "llama")
    kept = {}
    make = functools.partial(RaggedDeviceLayer, tables=kept)
    options = {"block_tokens": 16, "self_test": place.type != "cpu", "in_place": True}
    with kvclient.hf.attach(model, client, **options) as kv:
        text, cache = started(model, kv, prompt(40).to(place))
        step(model, [[text[-1]]], [cache], None, make)
        assert kept and all(ref() is not None for ref in kept[0][0])
        del cache
        assert all(ref() is None for ref in kept[0][0])
