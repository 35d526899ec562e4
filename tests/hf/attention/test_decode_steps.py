"""Proves that decoding a token costs no Python per block of the store or page of its own, in place and paged.

Method: one step of a tiny model's forward under sys.setprofile, which sees every call of Python and of
builtins, and with the library's functions counted; with few blocks and pages, and with many. The numbers must
be the same, also in the step that takes a new page. No time is measured.
"""

import gc
import sys
from collections import Counter

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf import attention
from kvclient.hf.cache.page_pool import PAGE_TOKENS
from kvclient.kernels import contract
from tests.hf.zoo import generate, known, prompt

BLOCK = 16
LAYERS = 3

pytestmark = pytest.mark.skipif(
    all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")),
    reason="no CPU kernels here",
)


class Counted:
    """The library, its calls counted."""

    def __init__(self, library) -> None:
        self._library, self.calls = library, Counter()

    def __getattr__(self, name):
        function = getattr(self._library, name)

        def call(*args):
            self.calls[name] += 1
            return function(*args)

        return call


def calls_of_a_step(model, cache, monkeypatch) -> tuple[int, Counter]:
    """(calls of Python and builtins in one forward of one token, calls of the library's functions)."""
    seen = 0

    def profile(_frame, event, _arg) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    library = Counted(contract.cpu())
    following = torch.full((cache.layers[0].get_batch_size(), 1), 7)
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(contract, "cpu", lambda: library)
        gc.collect()
        gc.disable()  # what another test left may have finalizers, whose calls would be counted here
        sys.setprofile(profile)
        try:
            model(following, past_key_values=cache)
        finally:
            sys.setprofile(None)
            gc.enable()
    return seen, library.calls


def cache_of(model, ids, new_tokens: int, rows: int):
    ids = ids.expand(rows, -1).contiguous()
    generate(model, ids, 1)
    cache = generate(model, ids, new_tokens)[2]
    for layer in cache.layers:
        layer.get_batch_size = lambda: rows
    with torch.no_grad():
        for _ in range(2):  # structs of a step of one token are there, and the workspace
            model(torch.full((rows, 1), 7), past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("paged", "rows", "codec"), [(False, 1, None), (False, 3, "int8"), (True, 3, None), (True, 1, "int8")]
)
def test_a_step_costs_the_same_calls_whatever_the_number_of_segments(paged, rows, codec, monkeypatch):
    model = known("llama")
    counts = []
    with kvclient.InMemoryClient(64 << 20) as client:
        options = {"block_tokens": 32 if codec else BLOCK, "codec": codec, "paged": paged}
        with kvclient.hf.attach(model, client, **options):
            for tokens in (64, 384):
                cache = cache_of(model, prompt(tokens + 3), 4, rows)
                assert len(cache.layers[0]._prefix) >= rows * tokens // 32
                counts.append(calls_of_a_step(model, cache, monkeypatch))
    assert counts[0] == counts[1]
    assert counts[0][1] == {"kvk_attend": LAYERS}


def test_a_step_costs_the_same_calls_whatever_the_number_of_pages(client, monkeypatch):
    model = known("llama")
    counts = []
    with kvclient.hf.attach(model, client, block_tokens=512, paged=True) as kv:
        for tokens in (PAGE_TOKENS + 3, 6 * PAGE_TOKENS + 3):
            cache = cache_of(model, prompt(tokens), 4, 1)
            assert kv.paged_stats().used == tokens // PAGE_TOKENS + 1
            counts.append(calls_of_a_step(model, cache, monkeypatch))
            del cache
    assert counts[0] == counts[1]


def test_the_step_that_takes_a_page_costs_the_same_calls_too(client, monkeypatch):
    model = known("llama")
    counts = []
    with kvclient.hf.attach(model, client, block_tokens=512, paged=True) as kv:
        for pages in (2, 7):
            cache = cache_of(model, prompt(pages * PAGE_TOKENS - 8), 7, 1)
            assert cache.get_seq_length() == pages * PAGE_TOKENS
            assert kv.paged_stats().used == pages
            counts.append(calls_of_a_step(model, cache, monkeypatch))
            assert kv.paged_stats().used == pages + 1
            del cache
    assert counts[0] == counts[1]
