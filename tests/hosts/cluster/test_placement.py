"""The pool's own rules: replicas on hosts that are chosen here, reads that fail over, puts that go elsewhere,
landing memory that stays with a read until it is over.

The rules run as they are on hosts that are dictionaries (machines.py). Real Mooncake is in test_cluster.py.
"""

import threading
import types

import pytest

from kvstored.cluster import pool
from kvstored.cluster.mooncake import Extent, Landing, Mooncake, NoRoom, Place
from kvstored.cluster.pool import Pool
from tests.hosts.cluster.machines import KEY, WAIT_S, Machines, block

BLOCK = block()


def got(made: Pool, space: str = "default"):
    """A small block's frames; None: the pool has not got it."""
    found = made.describe(made.find(space, KEY), KEY, lambda: None)
    return found and [found[0].layout, found[0].head, *found[1]]


@pytest.fixture
def four():
    machines = Machines(4)
    yield machines, Pool(machines, 2, machines.hosts)
    machines.over.set()


def holders(machines):
    return {endpoint for endpoint, objects in machines.objects.items() if objects}


def test_each_replica_lies_on_a_host_of_its_own_and_is_not_put_twice(four):
    machines, made = four
    assert len(made.put("default", KEY, BLOCK)) == 2
    assert len(holders(machines)) == 2
    asked = len(machines.asked)
    assert len(Pool(machines, 2, machines.hosts).put("default", KEY, BLOCK)) == 2
    assert len(machines.asked) == asked, "another host finds both there"
    assert got(made) == BLOCK
    assert got(made, "other") is None


@pytest.mark.parametrize("fate", ["dead", "still"])
def test_a_read_goes_on_at_the_live_replica_and_the_other_host_is_left_alone(four, fate):
    machines, made = four
    made.put("default", KEY, BLOCK)
    for first in sorted(holders(machines) - {"e0"}):
        fresh = Pool(machines, 2, machines.hosts)
        getattr(machines, fate).add(first)
        for _ in range(4):
            assert got(fresh)
        assert machines.asked.count(first) <= 2 * 4
        machines.asked.clear()
        got(fresh)
        assert first not in machines.asked or len(holders(machines)) == 1
        getattr(machines, fate).discard(first)
        machines.asked.clear()


@pytest.mark.parametrize("fate", ["dead", "still"])
def test_a_put_goes_elsewhere(four, fate):
    machines, made = four
    made.put("default", KEY, BLOCK)
    lost = sorted(holders(machines) - {"e0"})[0]
    for objects in machines.objects.values():
        objects.clear()
    getattr(machines, fate).add(lost)
    assert len(made.put("default", KEY, BLOCK)) == 2
    assert lost not in holders(machines) and len(holders(machines)) == 2
    assert made.counts["placed_elsewhere"] == 1 and made.counts["put_failed"] == 0
    machines.asked.clear()
    assert len(made.put("default", bytes(32), BLOCK)) == 2
    assert lost not in machines.asked, "it is left alone for a while"


def test_a_replica_that_does_not_verify_is_none(four):
    machines, made = four
    made.put("default", KEY, BLOCK)
    spoilt, good = sorted(holders(machines))
    objects = machines.objects[spoilt]
    whole = next(iter(objects.values()))
    for at in range(0, len(whole), 3):
        objects[next(iter(objects))] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        assert got(made)
    objects[next(iter(objects))] = whole[:30] + bytes([whole[30] ^ 1]) + whole[31:]
    machines.objects[good].clear()
    assert got(made) is None
    assert made.counts["corrupt"] > 0


def test_a_host_that_stands_still_has_few_calls_and_the_others_go_on(four):
    machines, made = four
    made.put("default", KEY, BLOCK)
    for lost in holders(machines) - {"e0"}:
        machines.still.add(lost)
    if len(machines.still) == 2:
        machines.still.pop()
    made._leave_alone = lambda host: None  # nobody is left alone: only the bound holds
    for _ in range(pool.MOST_OF_A_HOST + 4):
        assert got(made)
    assert sum(machines.asked.count(host) for host in machines.still) <= pool.MOST_OF_A_HOST + 1


def test_a_master_that_does_not_answer_is_a_miss(four):
    machines, made = four
    made.put("default", KEY, BLOCK)

    def still(names):
        machines.over.wait(WAIT_S)
        return {}

    machines.places = still
    assert got(made) is None
    assert len(made.put("default", KEY, BLOCK)) == 0 and made.counts["put_failed"] == 1


def test_a_host_is_not_left_alone_because_memory_is_short_here(four):
    machines, made = four
    made.put("default", KEY, BLOCK)
    straight = machines.read

    def read(place, length):
        raise NoRoom

    machines.read = read
    assert got(made) is None
    machines.read = straight
    places = made.find("default", KEY)
    known, _ = made.describe(places, KEY, lambda: None)
    ended = threading.Event()
    extent = Extent(-1, 0, known.extent_bytes)  # cannot be written to
    assert made.bring(places, known, extent, lambda: None, ended.set) is None and ended.is_set()
    assert len(made.reached("default", KEY)) == 2, "both would have given it"


def test_memory_that_a_read_lands_in_is_quarantined_until_it_is_over():
    over, begun, landed = threading.Event(), threading.Event(), []

    def transfer_sync_read(endpoint, at, address, length):
        landed.append((at, length))
        if endpoint == "still":
            begun.set()
            assert over.wait(WAIT_S)
        return 0

    mooncake = object.__new__(Mooncake)
    mooncake._engine = types.SimpleNamespace(transfer_sync_read=transfer_sync_read)
    mooncake._landing = Landing(1 << 16)
    late = threading.Thread(target=mooncake.read, args=(Place("still", 0, 40000), 40000))
    late.start()
    assert begun.wait(WAIT_S)
    assert len(mooncake.read(Place("live", 0, 20000), 20000)) == 20000
    with pytest.raises(NoRoom):  # the rest is the late one's
        mooncake.read(Place("live", 0, 40000), 40000)
    first, second = landed
    assert second[0] >= first[0] + first[1]
    over.set()
    late.join()
    assert len(mooncake.read(Place("live", 0, 1 << 16), 1 << 16)) == 1 << 16, "and all of it is joined again"


def test_a_call_for_which_there_is_no_thread_is_not_counted_and_not_made(four, monkeypatch):
    """Not even later: the extent that it would have filled is somebody else's then."""
    machines, made = four
    submit, calls = made._calls.submit, []

    def refused(call):
        calls.append(call)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(made._calls, "submit", refused)
    for _ in range(2 * pool.MOST_OF_A_HOST):
        assert made.find("default", KEY) == [] and made.put("default", KEY, BLOCK) == frozenset()
    monkeypatch.setattr(made._calls, "submit", submit)
    for call in calls:  # they were in the queue all the same
        call()
    assert machines.asked == []
    assert len(made.put("default", KEY, BLOCK)) == 2


def test_a_call_that_a_thread_had_taken_goes_on_though_no_other_could_start(four, monkeypatch):
    _machines, made = four

    def taken(call):
        call()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(made._calls, "submit", taken)
    for _ in range(2 * pool.MOST_OF_A_HOST):
        assert len(made.put("default", KEY, BLOCK)) == 2
