"""Proves that attention in place is safe over a real daemon that deletes, evicts, dies.

Method: a tiny random model over `kvstored serve` with a small pool. A warm cache is kept while its blocks are
deleted and the pool is filled many times over, then while the daemon is killed; what is generated from it
must be what the model says without any store. When the cache is gone, so are its pins.
"""

import gc

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf import attention
from kvclient.hf.cache.in_place import InPlaceLayer
from tests.hf.zoo import build, generate, prompt

BLOCK = 16
LAYOUT = kvclient.Layout(3, 2, 8, "float32", BLOCK)

pytestmark = pytest.mark.skipif(
    all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")),
    reason="no CPU kernels here",
)


def fill(client, salt: int, blocks: int = 1000) -> None:
    """Writes more than the pool holds, so that everything that is not pinned goes."""
    layout_id = client.register_layout(LAYOUT)
    for start in range(0, blocks, 50):
        chain = kvclient.chain(bytes([salt]) * 32, list(range(start, start + 50 * BLOCK)), block_tokens=BLOCK)
        with client.create(chain, layout_id, priority=100) as writer:
            for index in writer.granted:
                for layer in range(LAYOUT.num_layers):
                    writer[index].layer(layer)[:] = 9e9


@pytest.fixture
def warm(daemon):
    """(model, tokens, their plain continuation, daemon, client, attachment, cache with 3 blocks in place)."""
    started = daemon(memory="8MiB")
    model, ids = build("llama"), prompt(61)
    plain, *_ = generate(model, ids, 12)
    with (
        started.connect() as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=True) as kv,
    ):
        generate(model, ids, 4)
        tokens, _, cache = generate(model, ids, 4)
        assert kv.last.reused_tokens == 48
        yield model, tokens, plain, started, client, kv, cache


def test_blocks_in_use_outlive_deletion_and_eviction(warm):
    model, tokens, plain, _, client, kv, cache = warm
    chain = kvclient.chain(kv.identity, tokens[0, :48].tolist(), block_tokens=BLOCK)
    assert client.delete(chain)
    for salt in range(3):
        fill(client, salt)
    assert client.lookup(chain).resident == 0
    rest, *_ = generate(model, tokens, 8, past_key_values=cache)
    assert torch.equal(rest, plain)
    assert all(isinstance(layer, InPlaceLayer) and layer.origin == 48 for layer in cache.layers)


def test_blocks_in_use_outlive_the_daemon(warm):
    model, tokens, plain, started, _, _, cache = warm
    started.kill()
    rest, *_ = generate(model, tokens, 8, past_key_values=cache)
    assert torch.equal(rest, plain)


def test_a_cache_that_is_gone_pins_nothing(warm):
    """A pinned block cannot be evicted; when the cache is dropped, filling the pool takes its blocks too."""
    _, tokens, _, _, client, kv, cache = warm
    chain = kvclient.chain(kv.identity, tokens[0, :48].tolist(), block_tokens=BLOCK)
    fill(client, 1)
    assert client.lookup(chain).resident == 3
    cache.layers.clear()
    del cache
    gc.collect()
    for salt in range(2, 6):
        fill(client, salt)
    assert client.lookup(chain).resident == 0
