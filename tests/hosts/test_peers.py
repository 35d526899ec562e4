"""Blocks of one host's daemon got on another's: real daemons on addresses of loopback, real sockets.

Method: every block's bytes are a function of its key, so whatever is handed out can be checked. What is
spoiled on the way, or by a peer that is gone, must be a miss that is counted.
"""

import os
import signal
import socket
import threading
import time

import pytest

from kvclient.errors import BlockLost
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys, pattern
from kvstored.config.config import Config
from kvstored.config.peers import network
from kvstored.config.peers import peers as parse_peers
from kvstored.errors import ConfigError
from tests.hosts.hosts import Hosts, Proxy, told


def put(client, keys, geometry=SMALL):
    layout_id = client.register_layout(geometry.to_blob())
    with client.create(keys, layout_id) as writer:
        for block in writer:
            fill(block, geometry.num_layers)
    return layout_id


def checked(blocks, keys, geometry):
    for block, key in zip(blocks, keys, strict=True):
        check(block, geometry.num_layers)
        assert block.key == key


@pytest.mark.parametrize("geometry", [SMALL, BIG], ids=["small", "big"])
def test_a_block_of_one_host_is_a_hit_on_the_other(daemon, tmp_path, wait_until, geometry):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys = new_keys(8)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys, geometry)
        told(reader, keys)
        assert reader.get(keys)[0] is None  # nothing is fetched unasked
        with reader.get(keys, wait_s=30, verify=True) as blocks:
            checked(blocks, keys, geometry)
        with reader.get(keys) as blocks:  # and now it lies here
            checked(blocks, keys, geometry)
        assert reader.get(new_keys(3), wait_s=30)[0] is None  # nobody has it: an answer, not a wait
    seen = hosts.peers(1)["n0"]
    assert seen["fetched"] == 8 and seen["state"] == "up"
    assert seen["missing"] == 0, "nobody is asked for what nobody said that he has"
    server = hosts.peers(0)["server"]
    assert (server["served_blocks"], server["tls"]) == (8, 0)


def test_a_block_is_followed_layer_by_layer_while_it_is_still_being_computed(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    (key,) = keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        with claimed as blocks:
            block = blocks[0]
            block.meta[:32] = key
            for layer in range(SMALL.num_layers):
                block.layer(layer)[...] = pattern(key, layer, block.layer(layer).shape)
                block.mark_layer(layer)
                if layer == 0:  # nothing more is computed before this one is read over there
                    told(reader, keys)
                    follower = reader.get(keys, follow=True, wait_s=30)[0]
                follower.wait_layer(layer, timeout_s=30)
                seen = follower.layer(layer)
                assert (seen == pattern(key, layer, seen.shape)).all()
        check(reader.get(keys, wait_s=30)[0])


def test_a_writer_that_gives_up_is_told_to_who_follows_on_the_other_host(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        with pytest.raises(RuntimeError, match="changed its mind"), claimed as blocks:
            block = blocks[0]
            block.layer(0)[...] = 1
            block.mark_layer(0)
            told(reader, keys)
            follower = reader.get(keys, follow=True, wait_s=30)
            follower.wait_layer(0, timeout_s=30)
            raise RuntimeError("changed its mind")
        with pytest.raises(BlockLost):
            follower.wait_layer(1, timeout_s=30)
        follower.release()
        assert reader.get(keys, wait_s=30)[0] is None
        wait_until(lambda: reader.stats()["used_bytes"] == 0, "its memory is free")


@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_a_peer_that_is_gone_is_a_miss_soon_and_asked_again_later(daemon, tmp_path, wait_until, fate):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys, others = new_keys(4), new_keys(4)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys + others)
        told(reader, keys + others)
        if fate == "killed":
            hosts[0].kill()
        else:
            os.kill(hosts[0].pid, signal.SIGSTOP)
            os.waitpid(hosts[0].pid, os.WUNTRACED)  # all its threads stand
        began = time.monotonic()
        try:
            assert list(reader.get(keys, wait_s=60)) == [None] * 4
            took_s = time.monotonic() - began
        finally:
            hosts[0].start() if fate == "killed" else os.kill(hosts[0].pid, signal.SIGCONT)
        assert took_s < 30, "it waited for a peer that is gone"  # 2 s, and what a busy machine adds
        wait_until(lambda: hosts.peers(1)["n0"]["state"] == "up", "it is up again")
        told(reader, others)
        checked(reader.get(others, wait_s=30), others, SMALL)


@pytest.mark.parametrize("after", [0, 40, 90, 150, 600, 2000, 4700])
def test_a_byte_flipped_on_the_way_is_a_miss_that_is_counted(daemon, tmp_path, wait_until, after):
    """In a frame's head, a layout, a block's head, its meta area, its layers."""
    hosts = Hosts(daemon, tmp_path)
    proxy = Proxy(hosts.addresses[0])
    hosts.reroute(1, 0, proxy.address)
    hosts.start().wait_up(wait_until)
    keys, passed, spoiling = new_keys(1), 0, False

    def flip(data: bytes) -> bytes:
        nonlocal passed
        if not spoiling:
            return data
        at, passed = after - passed, passed + len(data)
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] if 0 <= at < len(data) else data

    try:
        with hosts[0].connect() as writer, hosts[1].connect() as reader:
            put(writer, keys)
            told(reader, keys)
            proxy.change, spoiling = flip, True
            got = reader.get(keys, wait_s=30)[0]
            assert passed > after, "the byte was on the way"
            seen = hosts.peers(1)["n0"]
            assert seen["corrupt"] + seen["malformed"] >= 1
            if got is None:
                assert seen["fetched"] == 0 and reader.stats()["used_bytes"] == 0
            else:  # a layer was here before it, and the rest came over another connection
                assert after >= 2000
                check(got)
            wait_until(lambda: reader.get(keys, wait_s=30)[0] is not None, "the way is good")
            check(reader.get(keys)[0])
    finally:
        proxy.close()


def test_of_two_that_have_it_the_living_one_answers(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path, count=3).start().wait_up(wait_until)
    keys = new_keys(16)
    with hosts[0].connect() as here, hosts[1].connect() as there, hosts[2].connect() as reader:
        put(here, keys)
        put(there, keys)
        wait_until(lambda: all(hosts.peers(2)[f"n{i}"]["held"] >= 16 for i in (0, 1)), "word came of both")
        hosts[0].kill()
        checked(reader.get(keys, wait_s=60), keys, SMALL)
        assert hosts.peers(2)["n1"]["fetched"] == 16


def test_what_is_not_shared_or_has_another_salt_is_read_by_nobody(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path)
    other = tmp_path / "other"
    other.write_text("another salt than the other's")
    other.chmod(0o600)
    hosts[1].args[-1] = f"default:salt=file:{other}:share=read"
    hosts.start()
    wait_until(lambda: hosts.peers(1)["n0"]["refused"], "it was refused")
    keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys)
        assert reader.get(keys, wait_s=30)[0] is None
    # One answer for each, for who asks may be anybody.
    wait_until(lambda: all(word in hosts.peers(1)["n0"]["why"] for word in ("salt", "n1 is no peer")), "why")
    assert hosts.peers(0)["server"]["served_blocks"] == 0


def test_a_stranger_gets_nothing_and_holds_nothing(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    host, _, port = hosts.addresses[0].partition(":")
    before = hosts.peers(0)["server"]
    open_files = len(os.listdir(f"/proc/{hosts[0].pid}/fd"))
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(said)
            with_nothing = b""
            try:
                with_nothing = stranger.recv(1)
            except ConnectionError:
                pass
            assert with_nothing == b""
    wait_until(lambda: hosts.peers(0)["server"]["refused"] >= before["refused"] + 3, "they are refused")
    wait_until(lambda: len(os.listdir(f"/proc/{hosts[0].pid}/fd")) <= open_files, "and hold no descriptor")
    assert not [line for line in hosts[0].log().splitlines() if " info " not in line]


def test_a_block_that_is_wanted_by_many_is_fetched_once(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys = new_keys(4)
    with hosts[0].connect() as writer:
        put(writer, keys, BIG)
    with hosts[1].connect() as reader:
        told(reader, keys)
    failures = []

    def read():
        try:
            with hosts[1].connect() as reader:
                checked(reader.get(keys, wait_s=60), keys, BIG)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert hosts.peers(1)["n0"]["fetched"] == 4
    assert hosts.peers(0)["server"]["served_blocks"] == 4


def test_off_loopback_a_trusted_network_has_to_be_named():
    peers = parse_peers("b=10.1.2.3:7400")
    with pytest.raises(ConfigError, match="trusted_network"):
        Config(dir="/tmp/x", node="a", peer=peers)
    with pytest.raises(ConfigError, match="node"):
        Config(dir="/tmp/x", peer=parse_peers("b=127.0.0.1:7400"))
    with pytest.raises(ValueError, match="salt"):
        from kvstored.config.namespaces import parse

        parse("default:share=read")
    with pytest.raises(ValueError, match=r"10\.1\.2\.0/24 is the network"):
        network("10.1.2.3/24")
    assert str(network("10.1.2.3")) == "10.1.2.3/32"
    with pytest.raises(ValueError, match="every address there is"):
        network("0.0.0.0/0")  # it was taken, and everybody refused
    with pytest.raises(ValueError, match="'b' is named twice"):
        parse_peers("b=127.0.0.1:1,c=127.0.0.1:2,b=127.0.0.1:3")
