"""A peer that proves the salt and then lies costs the reader a miss, soon, and is counted; what it says
afterwards, if it is true, is taken.

One daemon, and a peer of our own that plays back the daemon's own answer with one thing changed. Each lie is
of another block: a daemon does not ask again at once for what it was not given.
"""

import dataclasses
import os
import select
import socket
import time

import pytest

from kvclient.testing.conformance.case import SMALL, check, fill, new_keys
from kvstored.cluster import frames
from tests.conftest import wait_for
from tests.hosts.hosts import Hosts
from tests.hosts.proof.liar import Liar, recorded

WAIT_S = 60.0


def replaced(said, kind, **changes):
    return [dataclasses.replace(frame, **changes) if frame.kind == kind else frame for frame in said]


def payload_of(said, kind):
    return next(frame.payload for frame in said if frame.kind == kind)


def another_key(said):
    head = payload_of(said, frames.BLOCK_HEAD)
    return replaced(said, frames.BLOCK_HEAD, payload=os.urandom(32) + head[32:])


def another_layout(said):
    head = payload_of(said, frames.BLOCK_HEAD)
    return replaced(said, frames.BLOCK_HEAD, payload=head[:32] + os.urandom(32) + head[64:])


def longer(said):
    return replaced(said, frames.LAYER, payload=payload_of(said, frames.LAYER) + b"more")


def shorter(said):
    return replaced(said, frames.LAYER, payload=payload_of(said, frames.LAYER)[:-1])


def one_layer_too_many(said):
    last = said[-2]
    return [*said[:-1], dataclasses.replace(last, layer=last.layer + 1), said[-1]]


def whole_too_soon(said):
    return [*said[:3], said[-1]]


def of_another_fetch(said):
    return [dataclasses.replace(frame, item=9) for frame in said]


@pytest.fixture
def asked(daemon, tmp_path):
    """(daemon, its client, the liar, blocks as the daemon would send them by key)."""
    hosts = Hosts(daemon, tmp_path)
    hosts.start(0)
    keys = new_keys(12)
    with hosts[0].connect() as client:
        with client.create(keys, client.register_layout(SMALL.to_blob())) as blocks:
            for block in blocks:
                fill(block, SMALL.num_layers)
        salt = client.salt
        said = {key: recorded(hosts.addresses[0], "n1", "n0", salt, key) for key in keys}
        client.delete(keys)
        liar = Liar(hosts.addresses[1], "n1", "n0", salt, keys)
        wait_for(lambda: client.lookup(keys, peers=True).on_peers == len(keys))
        yield hosts, client, liar, said
        liar.close()


def misses(client, key):
    began = time.monotonic()
    with client.get([key], wait_s=WAIT_S) as got:
        assert got[0] is None
    assert time.monotonic() - began < WAIT_S / 2, "it waited for a liar"
    assert client.lookup([key]).states[0] == 0


def encoded(said, fetch):
    return b"".join(frame.encoded(frame.item, fetch.request) for frame in said)


def test_lies_under_right_checksums_are_misses_and_counted(asked):
    hosts, client, liar, said = asked
    lies = [
        another_key, another_layout, longer, shorter, one_layer_too_many, whole_too_soon, of_another_fetch,
    ]  # fmt: skip
    keys = iter(said)
    for lie in lies:
        key, before = next(keys), hosts.peers(0)["n1"]["malformed"]
        liar.answer = lambda to, fetch, key=key, lie=lie: to.sendall(encoded(lie(said[key]), fetch))
        misses(client, key)
        seen = hosts.peers(0)["n1"]
        assert seen["malformed"] == before + 1 and seen["fetched"] == 0, lie.__name__
        wait_for(lambda: client.lookup(list(said), peers=True).on_peers == len(said))  # it is up again
    assert client.stats()["used_bytes"] == 0
    liar.answer = lambda to, fetch: to.sendall(encoded(said[fetch.payload], fetch))
    key = next(keys)
    with client.get([key], wait_s=WAIT_S) as got:
        check(got[0], SMALL.num_layers)


@pytest.fixture
def older(monkeypatch):
    monkeypatch.setattr(frames, "VERSION", 2)


def test_one_of_before_halves_is_asked_for_whole_blocks(older, asked):
    """Of which it sends all, whatever its frame says besides."""
    _, client, liar, said = asked
    halves = []

    def answer(to: socket.socket, fetch):
        halves.append(fetch.item)
        to.sendall(encoded(said[fetch.payload], fetch))

    liar.answer = answer
    for key in list(said)[:3]:
        with client.get([key], wait_s=WAIT_S) as got:
            check(got[0], SMALL.num_layers)
    assert halves == [0, 0, 0]


def test_a_peer_that_says_it_has_what_it_has_not_is_a_miss(asked):
    hosts, client, liar, said = asked
    liar.answer = lambda to, fetch: to.sendall(frames.frame(frames.MISSING, request=fetch.request))
    misses(client, next(iter(said)))
    assert hosts.peers(0)["n1"]["missing"] == 1 and hosts.peers(0)["n1"]["state"] == "up"


@pytest.mark.parametrize("after", [0, 10, 400, 3000], ids=lambda n: f"after {n}")
def test_one_that_sends_a_byte_at_a_time_is_given_up(asked, after):
    hosts, client, liar, said = asked
    key = next(iter(said))

    def trickle(to: socket.socket, fetch):
        answer = encoded(said[key], fetch)
        to.sendall(answer[:after])
        for at in range(after, len(answer)):
            to.sendall(answer[at : at + 1])
            select.select([], [], [], 0.05)

    liar.answer = trickle
    misses(client, key)
    assert hosts.peers(0)["n1"]["stalled"] >= 1
    assert client.stats()["used_bytes"] == 0


def test_one_that_never_ends_is_given_up(asked):
    hosts, client, liar, said = asked
    key = next(iter(said))

    def go_on(to: socket.socket, fetch):
        meta = next(frame for frame in said[key] if frame.kind == frames.META)
        to.sendall(encoded(said[key][:3], fetch))
        while True:
            to.sendall(encoded([meta] * 100, fetch))

    liar.answer = go_on
    misses(client, key)
    assert hosts.peers(0)["n1"]["malformed"] == 1
    assert client.stats()["used_bytes"] == 0
