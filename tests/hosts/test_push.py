"""Blocks that a client of one host has another host come for: real daemons, and a peer that pushes unasked.

Method: nobody on the receiving host asks for the blocks; that they are there is seen by a look-up alone.
"""

import os

import pytest

from kvclient.errors import InvalidArgument, NotPermitted, Unavailable
from kvclient.testing.conformance.case import BIG, SMALL, check, new_keys, pattern
from kvstored.config.namespaces import parse as parse_namespaces
from tests.hosts.hosts import Hosts
from tests.hosts.proof.liar import Liar
from tests.hosts.test_peers import checked, put

MOST = 4096


@pytest.fixture
def pair(daemon, tmp_path, wait_until):
    """n1 takes what is pushed to it, n0 does not."""
    hosts = Hosts(daemon, tmp_path)
    takes_pushes(hosts, 1)
    return hosts.start().wait_up(wait_until)


def takes_pushes(hosts, host: int) -> None:
    args = hosts[host].args
    at = args.index("--namespaces") + 1
    args[at] = args[at].replace("share=read", "share=read-write")


def test_what_a_namespace_may_be_shared_for():
    shares = parse_namespaces("a=0.2:salt=file:/s:share=read,b=0.2:salt=file:/s:share=read-write,c")
    assert [space.share for space in shares] == ["read", "read-write", "none"]
    assert shares[1].shown().endswith('share = "read-write" }')
    with pytest.raises(ValueError, match="share of 'a' is 'write': one of none, read, read-write is wanted"):
        parse_namespaces("a:salt=file:/s:share=write")
    with pytest.raises(ValueError, match="'a' is shared and has no salt that a peer could have too"):
        parse_namespaces("a:share=read-write")


@pytest.mark.parametrize("geometry", [SMALL, BIG], ids=["small", "big"])
def test_what_is_pushed_is_there_before_anybody_asks(pair, wait_until, geometry):
    keys = new_keys(40)
    with pair[0].connect() as writer, pair[1].connect() as reader:
        put(writer, keys, geometry)
        assert writer.push(keys, "n1") == 40
        wait_until(lambda: reader.lookup(keys).resident == 40)
        with reader.get(keys, verify=True) as blocks:
            checked(blocks, keys, geometry)
        assert writer.push([], "n1") == 0
        assert writer.push(keys, "n1") == 40, "they are there already: nothing comes twice"
    seen = pair.peers(1)["n0"]
    assert seen["pushed"] >= 40 and seen["fetched"] == 40
    assert pair.peers(0)["n1"]["pushed"] == 0


def test_a_block_that_is_still_written_comes_layer_by_layer(pair, wait_until):
    (key,) = keys = new_keys(1)
    with pair[0].connect() as writer, pair[1].connect() as reader:
        with writer.create(keys, writer.register_layout(SMALL.to_blob())) as blocks:
            block = blocks[0]
            assert writer.push(keys, "n1") == 1
            block.meta[:32] = key
            for layer in range(SMALL.num_layers):
                block.layer(layer)[...] = pattern(key, layer, block.layer(layer).shape)
                block.mark_layer(layer)
                if layer == 0:
                    wait_until(lambda: reader.lookup(keys).states[0] == 1)
                    follower = reader.get(keys, follow=True)[0]
                follower.wait_layer(layer, timeout_s=30)
        wait_until(lambda: reader.lookup(keys).resident == 1)
        check(reader.get(keys)[0])


def test_a_host_that_takes_nothing_is_named(pair, wait_until):
    keys = new_keys(2)
    with pair[0].connect() as first, pair[1].connect() as second:
        put(second, keys)
        with pytest.raises(Unavailable, match=r"no host n0 takes .* those that do now: none"):
            second.push(keys, "n0")
        with pytest.raises(Unavailable, match=r"no host nobody takes .* those that do now: n1"):
            first.push(keys, "nobody")
        for name in ("", "n" * 64):
            with pytest.raises(InvalidArgument, match="1 to 63 bytes"):
                first.push(keys, name)
        with pair[0].connect(read_only=True) as reader, pytest.raises(NotPermitted):
            reader.push(keys, "n1")
    pair[1].kill()
    with pair[0].connect() as first:
        wait_until(lambda: not takes(first, "n1"))


def takes(client, node: str) -> bool:
    try:
        client.push(new_keys(1), node)
    except Unavailable:
        return False
    return True


def test_what_nobody_has_is_pushed_without_end(pair, wait_until):
    """Keys that are nowhere cost a moment each, and the next that is there comes."""
    keys = new_keys(3)
    with pair[0].connect() as writer, pair[1].connect() as reader:
        for _ in range(5):
            assert writer.push(new_keys(2 * MOST), "n1") <= 2 * MOST
        put(writer, keys)

        def there() -> bool:
            writer.push(keys, "n1")
            return reader.lookup(keys).resident == 3

        wait_until(there)
        with reader.get(keys) as blocks:
            checked(blocks, keys, SMALL)
        put(reader, more := new_keys(50))
        assert reader.lookup(more).resident == 50


@pytest.mark.parametrize(("share", "count"), [("read", 32), ("read-write", 31), ("read-write", 32 * 65)])
def test_a_peer_that_pushes_what_is_none_is_left(daemon, tmp_path, wait_until, share, count):
    """Without consent, parts of keys, and more than a frame may have."""
    hosts = Hosts(daemon, tmp_path)
    if share == "read-write":
        takes_pushes(hosts, 1)
    hosts.start(1)
    with hosts[1].connect() as client:
        liar = Liar(hosts.addresses[0], "n0", "n1", client.salt, [])
    liar.pushes = os.urandom(count)
    try:
        wait_until(lambda: hosts.peers(1)["n0"]["malformed"] > 0)
        assert hosts.peers(1)["n0"]["pushed"] == 0
        with hosts[1].connect() as client:
            put(client, keys := new_keys(5))
            assert client.lookup(keys).resident == 5
    finally:
        liar.close()
