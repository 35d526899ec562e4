"""What peers may take of a host: descriptors that the limit has room for, and sixteen streams to each, which
a prompt that nobody finishes does not block for others, nor one that nobody waits for any more; a quarter of
its memory, and the rest in turn.
"""

import contextlib
import sys

import pytest

from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys, pattern
from tests.conformance.grpc_door import GrpcClient
from tests.conftest import Daemon, DaemonFailed
from tests.hosts.hosts import Hosts, free_port, told
from tests.hosts.test_peers import checked, put

MOST_STREAMS = 16


def test_a_limit_on_open_files_that_the_peers_do_not_fit_in_is_said_at_the_start(daemon, tmp_path):
    hosts = Hosts(daemon, tmp_path)
    for i in range(30):
        hosts[0].args += ["--peer", f"m{i}=127.0.0.1:{free_port()}"]
    hosts[0].command = ["prlimit", "--nofile=300:300", sys.executable]
    with pytest.raises(DaemonFailed, match="limit on open files is 300, this configuration needs"):
        hosts[0].start()
    hosts[0].command = ["prlimit", "--nofile=300:2000", sys.executable]
    hosts[0].start()


def test_prompts_that_nobody_finishes_hold_streams_and_block_no_other(pair_of_hosts):
    hosts = pair_of_hosts
    keys, others = new_keys(MOST_STREAMS + 4), new_keys(8)
    with hosts[0].connect() as writer, hosts[1].connect() as reader, contextlib.ExitStack() as held:
        put(writer, others)
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        for index in range(len(keys)):
            target = claimed[index].layer(0)
            target[...] = pattern(claimed[index].key, 0, target.shape)
            claimed[index].mark_layer(0)
        told(reader, keys + others)
        for key in keys[: MOST_STREAMS - 1]:  # one after the other, so that each has a stream of its own
            assert held.enter_context(reader.get([key], follow=True, wait_s=30))[0].layers_ready == 1
        assert hosts.peers(1)["n0"]["streams"] >= MOST_STREAMS - 1
        for key in others:
            with reader.get([key], wait_s=30) as found:
                check(found[0])
        late = reader.prefetch(keys[MOST_STREAMS - 1 :])
        assert late == 5 and hosts.peers(1)["n0"]["streams"] <= MOST_STREAMS
        for index in range(len(keys)):
            fill(claimed[index])
        claimed.seal()
        with reader.get(keys, wait_s=30) as found:
            for block in found:
                check(block)
    assert hosts.peers(1)["n0"]["fetched"] == len(keys) + len(others)


def grpc_client(daemon):
    return GrpcClient(str(daemon.dir / "grpc.sock"))


@pytest.mark.parametrize("connect", [Daemon.connect, grpc_client], ids=["shared memory", "grpc"])
def test_what_nobody_waits_for_any_more_is_not_brought(pair_of_hosts, wait_until, connect):
    """Its writer takes longer than the reader waits: then nothing is held for it there, no stream here."""
    before, keys = pair_of_hosts.peers(1)["n0"]["cancelled"], new_keys(3)
    with pair_of_hosts[0].connect() as writer, pair_of_hosts[1].connect() as beside:
        claimed = writer.create(keys, writer.register_layout(SMALL.to_blob()))
        told(beside, keys)
        with connect(pair_of_hosts[1]) as reader:
            assert [*reader.get(keys, wait_s=0.2)] == [None] * len(keys)

        def given_up() -> bool:
            about = pair_of_hosts.peers(1)["n0"]
            held = about["in_flight"] or beside.stats()["created"] or writer.stats()["pins"]
            return about["cancelled"] == before + len(keys) and not held and about["state"] == "up"

        wait_until(given_up)
        claimed.abort()


def test_more_than_peers_may_hold_at_once_comes_whole(daemon, tmp_path, wait_until):
    """A quarter of the sender's memory may be pinned for peers: the rest waits its turn, and is no miss."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys = new_keys(40)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys, BIG)
        told(reader, keys)
        with reader.get(keys, wait_s=30) as blocks:
            checked(blocks, keys, BIG)
    assert hosts.peers(1)["n0"]["missing"] == 0
