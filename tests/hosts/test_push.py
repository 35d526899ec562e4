"""Blocks that a client of one host has another host come for: real daemons, and a peer that pushes unasked.

Method: nobody on the receiving host asks for the blocks; that they are there is seen by a look-up alone.
"""

import ctypes
import json
import os

import grpc
import pytest

from kvclient.errors import InvalidArgument, NotPermitted, Unavailable
from kvclient.testing.conformance.case import BIG, SMALL, check, new_keys, pattern
from kvstored.cli.main import main
from kvstored.config.namespaces import parse as parse_namespaces
from kvstored.errors import Exit
from kvstored.v1 import store_pb2
from tests.conformance import c_door
from tests.daemon.grpc_calls import CALL_S, Calls
from tests.hosts.hosts import Hosts, Proxy
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


def by_grpc(host, keys, to: str) -> int:
    with Calls(host.dir) as calls:
        return calls.store.Push(store_pb2.PushRequest(keys=keys, to=to), timeout=CALL_S).told


def by_c(host, keys, to: str) -> int:
    client, told = c_door.CClient(str(host.dir)), ctypes.c_size_t(77)
    try:
        names = c_door._packed(keys), ctypes.c_size_t(len(keys))
        c_door.checked(
            c_door.LIB.kvs_push(client._pointer, *names, to.encode(), ctypes.byref(told)),
        )
        return told.value
    finally:
        client.close()


def by_command(host, keys, to: str) -> int:
    names = [key.hex() for key in keys]
    assert main(["push", "--dir", str(host.dir), "--to", to, *names]) == Exit.DONE
    return len(keys)


@pytest.mark.parametrize("push", [by_grpc, by_c, by_command])
def test_every_door_pushes(pair, wait_until, push, capsys):
    keys = new_keys(30)
    more = keys + new_keys(1100 if push is by_command else 0)  # than a message has; these nobody has
    with pair[0].connect() as writer, pair[1].connect() as reader:
        put(writer, keys)
        assert push(pair[0], more, "n1") == len(more)
        wait_until(lambda: reader.lookup(keys).resident == len(keys))
        with reader.get(keys, verify=True) as blocks:
            checked(blocks, keys, SMALL)
    said = capsys.readouterr().out
    assert said == ("n1 is told to come for 1130\n" if push is by_command else "")


def test_every_door_says_who_takes(pair, capsys):
    (key,) = new_keys(1)
    with pytest.raises(grpc.RpcError) as refused:
        by_grpc(pair[0], [key], "nobody")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "those that do now: n1" in refused.value.details()
    for name in ("", "n" * 64):
        with pytest.raises(grpc.RpcError) as refused:
            by_grpc(pair[0], [key], name)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(Unavailable, match="those that do now: n1"):
        by_c(pair[0], [key], "nobody")
    with pytest.raises(InvalidArgument, match="1 to 63 bytes"):
        by_c(pair[0], [key], "")
    here = "--dir", str(pair[0].dir)
    assert main(["push", *here, "--to", "nobody", key.hex()]) == Exit.REFUSED
    assert "those that do now: n1" in capsys.readouterr().err
    assert main(["push", *here, "--to", "n1", key.hex(), "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out) == {"told": 1, "left_out": 0}


def test_a_word_that_is_lost_on_its_way_is_told_again(daemon, tmp_path, wait_until):
    """The connection takes it and then breaks: n1 never heard of these blocks."""
    hosts = Hosts(daemon, tmp_path)
    takes_pushes(hosts, 1)
    proxy = Proxy(hosts.addresses[0])
    hosts.reroute(1, 0, proxy.address)
    try:
        hosts.start().wait_up(wait_until)
        keys = new_keys(20)
        with hosts[0].connect() as writer, hosts[1].connect() as reader:
            proxy.cut.clear()
            put(writer, keys)
            assert writer.push(keys, "n1") == 20
            proxy.break_off()
            proxy.cut.set()
            wait_until(lambda: reader.lookup(keys).resident == 20)
            with reader.get(keys, verify=True) as blocks:
                checked(blocks, keys, SMALL)
    finally:
        proxy.close()


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
