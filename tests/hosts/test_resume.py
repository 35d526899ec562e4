"""A block whose connection breaks half-way goes on behind its last layer, from the same host or another that
has the same bytes; who follows it notices nothing. Of a host that has others nothing is mixed in. What was
asked on a connection that was gone already is asked once more, on another.
"""

import contextlib
import shutil
import threading

import pytest

from examples.test_ca import authority, certificate
from kvclient.errors import BlockLost
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys, pattern
from tests.hosts.hosts import Hosts, Proxy, free_port, told

LAYERS = SMALL.num_layers


def write_layer(block, layer):
    target = block.layer(layer)
    target[...] = pattern(block.key, layer, target.shape)
    if layer == 0:
        block.meta[:32] = block.key
    block.mark_layer(layer)


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_the_same_host_goes_on_after_the_connection_broke(daemon, tmp_path, wait_until, transport):
    hosts = Hosts(daemon, tmp_path)
    if transport == "tls":
        if not shutil.which("openssl"):
            pytest.skip("no openssl command to make certificates")
        authority(tmp_path / "tls")
        for node in ("n0", "n1"):
            certificate(tmp_path / "tls", node)
        hosts.speak_tls(tmp_path / "tls")
    proxy = Proxy(hosts.addresses[0])
    hosts.reroute(1, 0, proxy.address)
    hosts.start().wait_up(wait_until)
    (key,) = keys = new_keys(1)
    try:
        with hosts[0].connect() as writer, hosts[1].connect() as reader:
            claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
            write_layer(claimed[0], 0)
            told(reader, keys)
            with reader.get(keys, follow=True, wait_s=30) as blocks:
                for layer in range(LAYERS):
                    if layer:
                        write_layer(claimed[0], layer)
                    blocks[0].wait_layer(layer, timeout_s=30)
                    seen = blocks[0].layer(layer)
                    assert (seen == pattern(key, layer, seen.shape)).all()
                    if layer < 2:
                        proxy.break_off()
                claimed.seal()
                wait_until(lambda: blocks[0].sealed, "it is whole")
                check(blocks[0])
            with reader.get(keys, verify=True) as blocks:
                check(blocks[0])
            seen = hosts.peers(1)["n0"]
            assert seen["fetched"] == 1 and seen["gone"] >= 1
            assert f"transport={transport}" in hosts[1].log()
            reader.delete(keys)
            wait_until(lambda: reader.stats()["used_bytes"] == 0, "its memory is free")
    finally:
        proxy.close()


@pytest.mark.parametrize("bytes_there", ["the same", "others"])
def test_another_host_goes_on_if_it_has_the_same_block(daemon, tmp_path, wait_until, bytes_there):
    hosts = Hosts(daemon, tmp_path, count=3).start().wait_up(wait_until)
    keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as reader, hosts[2].connect() as other:
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        write_layer(claimed[0], 0)
        write_layer(claimed[0], 1)
        told(reader, keys)
        with reader.get(keys, follow=True, wait_s=30) as blocks:
            blocks[0].wait_layer(1, timeout_s=30)
            with other.create(keys, other.register_layout(SMALL.to_blob())) as whole:
                fill(whole[0])
                if bytes_there == "others":
                    whole[0].layer(1)[...] = 1
            wait_until(lambda: hosts.peers(1)["n2"]["held"] >= 1, "word came")
            hosts[0].kill()
            if bytes_there == "the same":
                blocks[0].wait_layer(LAYERS - 1, timeout_s=30)
                wait_until(lambda: blocks[0].sealed, "it is whole")
                check(blocks[0])
                assert hosts.peers(1)["n2"]["fetched"] == 1
            else:
                with pytest.raises(BlockLost):
                    blocks[0].wait_layer(LAYERS - 1, timeout_s=30)


def test_a_block_that_nobody_has_the_rest_of_is_lost_soon(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        write_layer(claimed[0], 0)
        told(reader, keys)
        with reader.get(keys, follow=True, wait_s=30) as blocks:
            blocks[0].wait_layer(0, timeout_s=30)
            hosts[0].kill()
            with pytest.raises(BlockLost):
                blocks[0].wait_layer(1, timeout_s=30)
        wait_until(lambda: reader.stats()["used_bytes"] == 0, "its memory is free")


def test_two_hosts_do_not_wait_for_each_other_when_the_writers_is_gone(daemon, tmp_path, wait_until):
    """One had the block from the other, who asked it for the rest: both said that it was on its way, for two
    minutes."""
    hosts = Hosts(daemon, tmp_path, count=3)
    hosts.reroute(2, 0, f"127.0.0.1:{free_port()}")
    hosts.start()
    wait_until(lambda: hosts.peers(2)["n1"]["complete"] and hosts.peers(1)["n0"]["complete"])
    wait_until(lambda: hosts.peers(1)["n2"]["complete"])
    keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as near, hosts[2].connect() as far:
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        write_layer(claimed[0], 0)
        with contextlib.ExitStack() as held:
            blocks = []
            for reader in (near, far):
                told(reader, keys)
                blocks += held.enter_context(reader.get(keys, follow=True, wait_s=30))
                blocks[-1].wait_layer(0, timeout_s=30)
            wait_until(lambda: hosts.peers(1)["n2"]["held"] >= 1, "word came that the other has it")
            hosts[0].kill()
            for block in blocks:
                with pytest.raises(BlockLost):
                    block.wait_layer(1, timeout_s=60)
        for reader in (near, far):
            wait_until(lambda reader=reader: reader.stats()["used_bytes"] == 0, "its memory is free")


def test_what_is_asked_on_connections_that_are_gone_is_asked_once_more(daemon, tmp_path, wait_until):
    """By one reader, then by several on all streams: nobody gets a miss, and the host is not called down."""
    hosts = Hosts(daemon, tmp_path)
    proxy = Proxy(hosts.addresses[0])
    hosts.reroute(1, 0, proxy.address)
    hosts.start().wait_up(wait_until)
    keys, missed = new_keys(200), []

    def read(some):
        with hosts[1].connect() as reader, reader.get(some, wait_s=30) as blocks:
            missed.extend(key for key, block in zip(some, blocks, strict=True) if block is None)

    try:
        with hosts[0].connect() as writer, hosts[1].connect() as reader:
            with writer.create(keys, writer.register_layout(SMALL.to_blob())) as blocks:
                for block in blocks:
                    fill(block)
            told(reader, keys)
            for first in range(0, 160, 4):  # streams that nothing was asked on yet have no connection to lose
                proxy.forget()
                read(keys[first : first + 4])
            assert not missed and proxy.dropped >= 20
            proxy.forget()
            readers = [threading.Thread(target=read, args=(keys[k : k + 4],)) for k in range(160, 200, 4)]
            for each in readers:
                each.start()
            for each in readers:
                each.join()
            assert not missed
            seen = hosts.peers(1)["n0"]
            assert seen["state"] == "up" and seen["gone"] >= 20 and seen["failed"] == 0
    finally:
        proxy.close()
