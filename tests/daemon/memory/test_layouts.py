"""Layouts come and go: hundreds of models, one after the other, in a store that nobody restarts.

Method: a real daemon and clients of two processes' worth of state; layouts without blocks lose their places
while others still hold their ids, views of their blocks, or blocks in the daemon's next life.
"""

import json
import os

import pytest

import kvclient
from kvclient import Layout
from kvstored.cli.main import main

PLACES = 512


def nth(number: int) -> Layout:
    """Another one for each number, 64 bytes a token."""
    return Layout(1, 1, 16, "float16", 2 + number)


def put(client, layout_id: int, fill: int) -> bytes:
    key = os.urandom(32)
    with client.create([key], layout_id, token_counts=[2]) as writer:
        writer[0].layer(0)[:] = fill
    return key


def filled(view) -> set[float]:
    return set(view.layer(0).ravel().tolist())


@pytest.fixture
def kvstored(daemon):
    return daemon(memory="64MiB")


def test_many_come_and_go_under_clients_that_hold_old_ids(kvstored):
    client, other = kvstored.connect(), kvstored.connect()
    first = client.register_layout(nth(0))
    key = put(client, first, 7)
    kept = other.register_layout(nth(1))  # without a block
    view = other.get([key])
    read = view[0]
    assert client.delete([key]) == 1
    ids: list[int] = []
    for number in range(2, 700):
        ids.append(client.register_layout(nth(number)))
        put(client, ids[-1], number % 100)
    assert len(set(ids)) == len(ids)
    assert filled(read) == {7.0} and read.layout_id == first, "a reader of a block whose layout has gone"
    view.release()
    last = put(other, kept, 9)  # its place went to another: registered again without a word
    assert filled(client.get([last])[0]) == {9.0}
    kvstored.restart(kill=True)
    assert filled(client.get([last])[0]) == {9.0}
    again = put(client, first, 8)
    found = other.get([again])[0]
    assert filled(found) == {8.0} and found.tokens == 2
    stranger = kvstored.connect()
    with pytest.raises(kvclient.errors.LayoutLost, match="registered by another client"):
        stranger.create([os.urandom(32)], first)
    with pytest.raises(kvclient.errors.InvalidArgument, match="not registered"):
        stranger.create([os.urandom(32)], PLACES)


def test_the_command_lists_them(kvstored, capsys):
    client = kvstored.connect()
    empty = client.register_layout(nth(5))
    full = client.register_layout(Layout(3, 2, 8, "bfloat16", 16))
    with client.create([os.urandom(32)], full) as writer:
        writer.seal(zero_rest=True)
    assert main(["layouts", "--dir", str(kvstored.dir), "--json"]) == 0
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)}
    assert (found[empty]["blocks"], found[full]["blocks"], found[full]["sessions"]) == (0, 1, 1)
    assert found[full]["dtype"] == "bfloat16" and found[full]["num_layers"] == 3
    assert main(["layouts", "--dir", str(kvstored.dir)]) == 0
    text = capsys.readouterr().out
    assert "2 x 2 x 8" in text and "bfloat16" in text
