"""kvclient.blocks.Evictions: each block that left memory is told once, with where it is now, and nothing is
told that did not leave.

A real daemon, with and without a disk, and the in-memory fake. Stores are filled until blocks must go.
"""

import numpy as np
import pytest

import kvclient
from kvclient.blocks import Evictions, evictions
from kvclient.hf import Engine

LAYOUT = kvclient.Layout(1, 1, 1, "uint8", 1 << 15)  # 64 KiB a block
TOKENS = 1 << 15
STORED = 8


def stored(client, count, identity=bytes(32), priority=35):
    """Keys of so many blocks, sealed."""
    layout = client.register_layout(LAYOUT)
    chain = kvclient.chain(identity, np.arange(count * TOKENS, dtype=np.int32), TOKENS)
    with client.create(chain, layout, priority) as writer:
        writer.seal(zero_rest=True)
    return chain


def filled(client):
    """Others, of more priority, until nothing else is left."""
    for number in range(1, 5):
        stored(client, 256, bytes([number]) * 32, priority=90)


@pytest.fixture(params=["daemon", "fake"])
def client(request, daemon):
    if request.param == "fake":
        with kvclient.InMemoryClient(16 << 20) as client:
            yield client
    else:
        with kvclient.connect(dir=daemon(memory="16MiB").dir) as client:
            yield client


def test_what_was_evicted_is_told_once(client):
    chain, told = stored(client, STORED), []
    seen = Evictions(client, lambda key, where: told.append((key, where)))
    missing = bytes(31) + b"x"
    assert seen.add(chain) == STORED and seen.add([missing]) == 0 and len(seen) == STORED
    assert seen.look() == 0 and told == []
    filled(client)
    assert seen.look() == STORED and len(seen) == 0
    assert sorted(told) == sorted((key, "nowhere") for key in chain.keys)
    assert seen.look() == 0 and len(told) == STORED


def test_pinned_blocks_stay_and_deleted_ones_went(client):
    chain, told = stored(client, STORED), []
    seen = Evictions(client, lambda key, _where: told.append(key))
    assert seen.add(b"".join(chain.keys)) == STORED
    with client.get(chain[:2]) as kept:
        assert all(view is not None for view in kept)
        filled(client)
        assert seen.look() == STORED - 2 and not set(told) & set(chain.keys[:2])
    client.delete(chain[:2])
    assert seen.look() == 2 and set(told) == set(chain.keys)


def test_a_callback_that_raises_leaves_the_rest_for_the_next_look(client):
    chain, told = stored(client, STORED), []

    def once(key, _where):
        told.append(key)
        if len(told) == 1:
            raise RuntimeError("the first")

    seen = Evictions(client, once)
    seen.add(chain)
    client.delete(chain)
    with pytest.raises(RuntimeError):
        seen.look()
    assert seen.look() == STORED - 1 and sorted(told) == sorted(chain.keys)


def test_more_keys_than_its_bound_push_out_the_oldest(client, monkeypatch):
    monkeypatch.setattr(evictions, "MOST_KEYS", 5)
    monkeypatch.setattr(evictions, "AT_ONCE", 3)
    chain, told = stored(client, STORED), []
    seen = Evictions(client, lambda key, _where: told.append(key))
    seen.add(chain)
    assert len(seen) == 5 and seen.forgotten == 3
    client.delete(chain)
    assert seen.look() == 5 and told == chain.keys[3:]


def test_what_lies_on_disk_is_told_so(daemon, tmp_path, wait_until):
    disk = ("--disk", str(tmp_path / "blocks"), "--disk-quota", "1GiB", "--disk-write-priority", "0")
    with kvclient.connect(dir=daemon(memory="16MiB", args=disk).dir) as client:
        chain, told = stored(client, STORED), []
        wait_until(lambda: client.stats()["disk_written"] >= STORED, "all are written")
        seen = Evictions(client, lambda key, where: told.append(where))
        assert seen.add(chain) == STORED
        filled(client)
        assert seen.look() == STORED and told == ["disk"] * STORED


def test_an_unreachable_store_tells_nothing(daemon):
    server = daemon(memory="16MiB", args=("--discard",))
    with kvclient.connect(dir=server.dir, on_error="miss") as client:
        chain, told = stored(client, STORED), []
        seen = Evictions(client, lambda key, _where: told.append(key))
        seen.add(chain)
        server.stop()
        assert seen.look() == 0 and told == []
        server.start()
        with kvclient.connect(dir=server.dir):
            pass
    with kvclient.connect(dir=server.dir) as anew:
        seen._client = anew  # as after the backoff: the daemon began empty
        assert seen.look() == STORED


def test_an_engine_says_the_keys_of_a_text(home, client):
    told = []
    with Engine.from_pretrained(home, client, block_tokens=16, self_test=False) as engine:
        text = "A document of some words that fills a few blocks of sixteen tokens each. "
        engine.warm(text)
        seen = Evictions(client, lambda key, where: told.append((key, where)))
        assert seen.add(engine.keys(text)) == len(engine.encode(text)) // 16
        client.delete(engine.keys(text))
        seen.look()
        assert told == [(key, "nowhere") for key in engine.keys(text).keys]
        assert engine.generate(text + "What now?", 2).report.reused_tokens == 0
