"""The store's invariants where two hosts meet: a block's bytes, a local answer and memory that is given out
again owe nothing to a peer's life, and a slow link costs time alone.

Method: real daemons, killed, frozen and reached through a stream that a test delays.
"""

import os
import signal
import threading

import pytest

from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys, pattern
from tests.hosts.hosts import Hosts, Proxy, told

LAYERS = BIG.num_layers


def put(client, keys, geometry=SMALL):
    with client.create(keys, client.register_layout(geometry.to_blob())) as writer:
        for block in writer:
            if block is not None:
                fill(block, geometry.num_layers)


def test_bytes_that_are_held_here_stay_whatever_the_other_host_does(daemon, tmp_path, wait_until):
    """Invariant 1."""
    hosts = Hosts(daemon, tmp_path, memory="16MiB").start().wait_up(wait_until)
    keys = new_keys(2)
    with hosts[1].connect() as reader:
        with hosts[0].connect() as writer:
            put(writer, keys, BIG)
            told(reader, keys)
            held = reader.get(keys, wait_s=30)
            for harm in (
                lambda: writer.delete(keys),
                lambda: [put(writer, [new], BIG) for new in new_keys(40)],
            ):
                harm()
                for block in held:
                    check(block, LAYERS)
        hosts[0].kill()
        hosts[0].start()
        reader.delete(keys)
        for key in new_keys(40):  # all memory there is but theirs, several times over
            put(reader, [key], BIG)
            for block in held:
                check(block, LAYERS)
        held.release()
        wait_until(lambda: reader.stats()["pins"] == 0, "they are let go")


def test_a_peer_that_stands_still_holds_up_no_local_call(daemon, tmp_path, wait_until):
    """Invariant 9: between a get that waits for it and its answer, others are served. A busy machine may
    leave little time for that in one wait, so it waits several times."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    served = 0
    with hosts[0].connect() as writer, hosts[1].connect() as waiting, hosts[1].connect() as local:
        for _ in range(20):
            if served >= 5:
                break
            keys, found = new_keys(4), []
            wait_until(lambda: hosts.peers(1)["n0"]["state"] == "up", "it is up")
            put(writer, keys)
            told(waiting, keys)
            os.kill(hosts[0].pid, signal.SIGSTOP)
            os.waitpid(hosts[0].pid, os.WUNTRACED)
            try:
                thread = threading.Thread(target=lambda k=keys, f=found: f.extend(waiting.get(k, wait_s=60)))
                thread.start()
                while thread.is_alive() and served < 100:
                    mine = new_keys(4)
                    put(local, mine)
                    assert local.lookup(mine).resident == 4
                    with local.get(mine) as blocks:
                        for block in blocks:
                            check(block)
                    served += thread.is_alive()
                    local.delete(mine)
                thread.join()
            finally:
                os.kill(hosts[0].pid, signal.SIGCONT)
            assert found == [None] * 4
    assert served >= 5


def test_memory_that_a_fetch_was_filling_is_given_to_nobody_behind_a_restart(daemon, tmp_path, wait_until):
    """Invariant 11: the daemon dies while a block comes that a client follows."""
    hosts = Hosts(daemon, tmp_path, memory="16MiB").start().wait_up(wait_until)
    (key,) = keys = new_keys(1)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        claimed = writer.create(keys, writer.register_layout(BIG.to_blob()))
        target = claimed[0].layer(0)
        target[...] = pattern(key, 0, target.shape)
        claimed[0].mark_layer(0)
        told(reader, [key])
        with reader.get(keys, follow=True, wait_s=30) as blocks:
            blocks[0].wait_layer(0, timeout_s=30)
            seen = blocks[0].layer(0)
            hosts[1].kill()
            hosts[1].start()
            with hosts[1].connect() as other:
                for new in new_keys(40):
                    put(other, [new], BIG)
                    assert (seen == pattern(key, 0, seen.shape)).all()
        claimed.abort()
    with hosts[1].connect() as other:
        wait_until(lambda: other.stats()["quarantined"] == 0, "it is free once nobody reads it")


def test_of_two_hosts_writers_of_one_key_one_is_granted_and_neither_batch_fails(daemon, tmp_path, wait_until):
    """Invariants 3 and 4: what another host still computes is being written here too, for who follows it."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    (key, new), far = new_keys(2), SMALL.num_layers
    with hosts[0].connect() as there, hosts[1].connect() as here, hosts[1].connect() as second:
        claimed = there.create([key], there.register_layout(SMALL.to_blob()))
        first = claimed[0].layer(0)
        first[...] = pattern(key, 0, first.shape)
        claimed[0].mark_layer(0)
        told(here, [key])
        layout = second.register_layout(SMALL.to_blob())
        with here.get([key], follow=True, wait_s=30) as followed:
            followed[0].wait_layer(0, timeout_s=30)
            with second.create([key, new], layout) as writer:
                assert [str(word) for word in writer.results] == ["pending", "granted"]
                fill(writer[1])
            fill(claimed[0])
            claimed.seal()
            followed[0].wait_layer(far - 1, timeout_s=30)
            check(followed[0])
        with second.get([key, new], wait_s=30) as both:
            for block in both:
                check(block)
        with second.create([key], layout) as writer:
            assert [str(word) for word in writer.results] == ["exists"]


def test_a_batch_is_answered_for_each_key_wherever_it_lies(pair_of_hosts):
    """Invariant 6: here, on the other host, being written there, given up there, nowhere."""
    here, there, written, given_up, nowhere = new_keys(5)
    with pair_of_hosts[0].connect() as far, pair_of_hosts[1].connect() as near:
        put(near, [here])
        put(far, [there])
        claims = [far.create([key], far.register_layout(SMALL.to_blob())) for key in (given_up, written)]
        for claimed in claims:
            first = claimed[0].layer(0)
            first[...] = pattern(claimed[0].key, 0, first.shape)
            claimed[0].mark_layer(0)
        told(near, [there, written, given_up])
        claims[0].abort()
        with near.get([nowhere, here, given_up, there, written], follow=True, wait_s=30) as found:
            assert [block is not None for block in found] == [False, True, False, True, True]
            check(found[1])
            check(found[3])
            fill(claims[1][0])
            claims[1].seal()
            found[4].wait_layer(SMALL.num_layers - 1, timeout_s=30)
            check(found[4])


@pytest.mark.parametrize("delay_s", [0.005, 0.02])
def test_over_a_slow_link_a_batch_takes_few_turns(daemon, tmp_path, wait_until, delay_s):
    hosts = Hosts(daemon, tmp_path)
    proxy = Proxy(hosts.addresses[0])
    hosts.reroute(1, 0, proxy.address)
    hosts.start().wait_up(wait_until)
    keys, never, turns = new_keys(64), threading.Event(), 0

    def delayed(data: bytes) -> bytes:
        nonlocal turns
        turns += 1
        never.wait(delay_s)
        return data

    try:
        with hosts[0].connect() as writer, hosts[1].connect() as reader:
            put(writer, keys)
            told(reader, keys)
            proxy.change = delayed
            with reader.get(keys, wait_s=60) as blocks:
                for block in blocks:
                    check(block)
            assert turns < 64, "a turn for each block"
    finally:
        proxy.close()
