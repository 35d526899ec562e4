"""Proves that layers reach the device whole, in order and from memory that may be read, without a device.

Method: a library with the functions of native/kernels.h in Python, whose copies happen when somebody waits
for them and not before, on real shared maps; so a slot of the ring that is filled too early, a window that is
unregistered too early or an event recorded too early shows as wrong bytes. Which memory is registered when is
read off its list of calls. CUDA's own functions are tried in tests/gpu.
"""

import contextlib
import ctypes
import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvclient.errors import Closed, InvalidArgument
from kvclient.kernels import contract
from kvclient.kernels.host_memory import HostMemory
from kvclient.kernels.transfer import Ring, Transfer, copies_of, extent

PAGE = mmap.PAGESIZE


class LateLibrary:
    """Streams as queues. What is queued is done late: when somebody waits, up to what he waits for."""

    def __init__(self, read_only_works=True, refuse=False):
        self.read_only_works, self.refuse = read_only_works, refuse
        self.registered, self.calls, self.streams, self.events = {}, [], {}, {}
        self.pinned, self.next = {}, 1
        self.compute = []  # what wait() told a compute stream

    def _new(self, place, out):
        self.next += 1
        place[self.next] = []
        out._obj.value = self.next
        return contract.OK

    def kvk_stream_create(self, out):
        return self._new(self.streams, out)

    def kvk_event_create(self, out):
        return self._new(self.events, out)

    def kvk_host_allocate(self, count, out):
        memory = ctypes.create_string_buffer(count)
        out._obj.value = ctypes.addressof(memory)
        self.pinned[out._obj.value] = memory
        return contract.OK

    def kvk_host_free(self, address):
        del self.pinned[address]
        return contract.OK

    def kvk_host_register(self, address, count, read_only):
        self.calls.append(("register", count, bool(read_only)))
        if self.refuse or (read_only and not self.read_only_works):
            return contract.UNSUPPORTED
        assert not any(a < address + count and address < a + n for a, n in self.registered.items())
        self.registered[address] = count
        return contract.OK

    def kvk_host_unregister(self, address):
        assert not any(queue for queue in self.streams.values()), "copies are under way"
        del self.registered[address]
        return contract.OK

    def kvk_last_error(self):
        return b"refused"

    def kvk_copy(self, targets, sources, sizes, count, stream):
        columns = ((ctypes.c_int64 * count).from_address(column) for column in (targets, sources, sizes))
        for target, source, size in zip(*columns, strict=True):
            known = [*self.registered.items(), *((a, len(m)) for a, m in self.pinned.items())]
            assert any(a <= source and source + size <= a + n for a, n in known), "not pinned"
            self.streams[stream].append((target, source, size))
        return contract.OK

    def kvk_event_record(self, event, stream):
        self.events[event] = [stream, event]
        self.streams[stream].append(event)
        return contract.OK

    def kvk_event_wait(self, event, stream):
        self.compute.append((event, stream))
        return contract.OK

    def kvk_event_synchronise(self, event):
        stream = self.events[event][0]
        while event in self.streams[stream]:
            done = self.streams[stream].pop(0)
            if isinstance(done, tuple):
                ctypes.memmove(*done)
        return contract.OK

    def kvk_event_destroy(self, event):
        del self.events[event]
        return contract.OK

    def kvk_stream_destroy(self, stream):
        assert not self.streams.pop(stream)
        return contract.OK


@pytest.fixture
def shared():
    """A map of 64 pages of noise that another process could have, and the same for reading only."""
    descriptor = os.memfd_create("blocks")
    os.ftruncate(descriptor, 64 * PAGE)
    with mmap.mmap(descriptor, 64 * PAGE) as writable:
        writable[:] = random.Random(3).randbytes(64 * PAGE)
    ways = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ)
    maps = [mmap.mmap(descriptor, 64 * PAGE, prot=way) for way in ways]
    os.close(descriptor)
    return [np.frombuffer(mapping, np.uint8) for mapping in maps]


def layers_of(memory, layers, target, pieces=3):
    """Per layer some stretches of `memory`, and their places in `target`, which they fill."""
    cuts = sorted(random.Random(layers).sample(range(1, len(memory)), layers * pieces - 1))
    parts = list(zip([0, *cuts], [*cuts, len(memory)], strict=True))
    random.Random(5).shuffle(parts)
    start = extent(target)[0]
    return lambda layer: copies_of([(start + a, memory[a:b]) for a, b in parts[layer::layers]])


def take(memory, *arrays):
    found = [extent(array) for array in arrays]
    return memory.take(*np.array(found, np.int64).T)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("read_only_works", [False, True])
def test_every_byte_arrives(shared, read_only, read_only_works):
    library, source = LateLibrary(read_only_works), shared[read_only]
    memory, target = HostMemory(library, window_bytes=16 * PAGE), np.zeros(64 * PAGE, np.uint8)
    moving = Transfer(memory, 5, library)
    moving.start(layers_of(source, 5, target))
    for layer in range(5):
        moving.wait(layer, 77)
    assert [stream for _, stream in library.compute] == [77] * 5
    assert len({event for event, _ in library.compute}) == 5
    moving.close()
    assert np.array_equal(target, source)
    direct = read_only_works or not read_only
    assert moving.bounced_bytes == (0 if direct else 64 * PAGE)
    assert memory.registered_bytes == (64 * PAGE if direct else 0)
    assert memory.why_not == (None if direct else "refused")
    memory.close()
    assert not library.registered and not library.pinned and not library.events and not library.streams


def test_a_layer_is_ready_with_its_own_copies(shared):
    """Its event stands behind its copies and before the next layer's."""
    library, source, target = LateLibrary(), shared[0], np.zeros(64 * PAGE, np.uint8)
    moving = Transfer(HostMemory(library), 4, library)
    copies = layers_of(source, 4, target)
    moving.start(copies)
    moving.wait(1, 9)
    library.kvk_event_synchronise(library.compute[-1][0])
    begin = extent(target)[0]
    for layer in range(4):
        arrived = [
            np.array_equal(target[to - begin :][:size], source[at - extent(source)[0] :][:size])
            for to, at, size in zip(*copies(layer), strict=True)
        ]
        assert all(arrived) if layer < 2 else not any(arrived)
    moving.close()


def test_memory_that_is_no_shared_map_is_bounced_through_few_slots():
    library, source = LateLibrary(), np.frombuffer(random.Random(1).randbytes(200_000), np.uint8).copy()
    target = np.zeros(200_000, np.uint8)
    moving = Transfer(HostMemory(library), 2, library)
    moving._ring = Ring(library, slots=2, slot_bytes=7000)
    moving.start(layers_of(source, 2, target))
    moving.wait(1, 0)
    assert len(library.pinned) == 2
    moving.close()
    assert np.array_equal(target, source)


def test_a_window_is_registered_once_for_all_who_use_it(shared):
    library, source = LateLibrary(), shared[0]
    memory, target = HostMemory(library, window_bytes=64 * PAGE), np.zeros(64 * PAGE, np.uint8)
    transfers = [Transfer(memory, 2, library) for _ in range(3)]
    for moving in transfers:
        moving.start(layers_of(source, 2, target))
    for moving in transfers:
        moving.close()
    assert library.calls == [("register", 64 * PAGE, False)]


def test_no_more_is_registered_than_was_allowed(shared):
    library = LateLibrary()
    memory = HostMemory(library, window_bytes=8 * PAGE, most_bytes=16 * PAGE)
    memory.look()
    for window in [*range(8)] * 3:
        taken = take(memory, shared[0][window * 8 * PAGE :][: 8 * PAGE])
        assert len(taken.windows) == 1 and memory.registered_bytes <= 16 * PAGE
        memory.give_back(taken)
    held = [take(memory, shared[0][: 32 * PAGE])]  # in use: the bound gives way, the copy does not
    assert memory.registered_bytes == 32 * PAGE
    memory.give_back(held[0])
    memory.give_back(take(memory, shared[0][40 * PAGE : 41 * PAGE]))
    assert memory.registered_bytes <= 16 * PAGE


def test_what_was_unmapped_is_forgotten(shared):
    """At its address there may be other memory by now, of which the device knows nothing."""
    library = LateLibrary()
    memory = HostMemory(library)
    memory.look()
    memory.give_back(take(memory, shared[0][:PAGE]))
    assert memory.registered_bytes == 64 * PAGE
    del shared[:]  # the maps go with their arrays
    memory.look()
    assert memory.registered_bytes == 0 and not library.registered


def test_the_device_keeps_its_pages_when_their_owner_unmaps_them(shared):
    """A client that is closed takes its map away, and at that address there may be anything afterwards."""
    library, source = LateLibrary(), shared.pop(0)
    wanted, target = source.copy(), np.zeros(64 * PAGE, np.uint8)
    memory = HostMemory(library)
    memory.look()
    place, size = extent(source)
    taken = memory.take(np.array([place], np.int64), np.array([size], np.int64))
    del source
    assert f"\n{place:x}-" not in Path("/proc/self/maps").read_text()
    ctypes.memmove(extent(target)[0], int(taken.addresses[0]), size)
    assert np.array_equal(target, wanted)
    assert all(at >= place + size or at + length <= place for at, length in library.registered.items())
    memory.give_back(taken)
    memory.look()
    assert memory.registered_bytes == 0 and not library.registered


def test_pieces_meet_where_windows_do(shared):
    library = LateLibrary()
    memory, source = HostMemory(library, window_bytes=4 * PAGE), shared[0]
    memory.look()
    parts = [source[7:100], source[3 * PAGE : 13 * PAGE + 5], source[:0], source[5 * PAGE : 6 * PAGE]]
    taken = take(memory, *parts)
    for number, part in enumerate(parts):
        mine = taken.items == number
        found = {}
        for offset, address, size in zip(*(c[mine].tolist() for c in taken[1:4]), strict=True):
            found |= {offset + i: byte for i, byte in enumerate(ctypes.string_at(address, size))}
        assert bytes(found[i] for i in range(len(part))) == part.tobytes() and len(found) == len(part)
    assert len(library.registered) == 4 and len(taken.items) == 1 + 4 + 1


@pytest.mark.parametrize("refuse", [False, True])
def test_what_a_layer_raises_is_raised_where_it_is_awaited(shared, refuse):
    """Bounced, by a thread; and queued at once, where start() raises it as well."""
    library, target = LateLibrary(refuse=refuse), np.zeros(64 * PAGE, np.uint8)
    moving = Transfer(HostMemory(library), 3, library)
    copies = layers_of(shared[0], 3, target)

    def lost(layer):
        if layer == 1:
            raise Closed("the block is gone")
        return copies(layer)

    with contextlib.nullcontext() if refuse else pytest.raises(Closed, match="gone"):
        moving.start(lost)
    moving.wait(0, 0)
    for layer in (1, 2):
        with pytest.raises(Closed, match="gone"):
            moving.wait(layer, 0)
    moving.close()
    moving.close()


def test_scattered_memory_is_refused(shared):
    with pytest.raises(InvalidArgument, match="not contiguous"):
        extent(shared[0][::2])


def test_a_window_that_cannot_be_had_leaves_no_user_of_the_others(shared, monkeypatch):
    library = LateLibrary()
    memory, told = HostMemory(library, window_bytes=16 * PAGE), library.kvk_host_register
    memory.look()
    monkeypatch.setattr(
        library, "kvk_host_register", lambda *args: contract.DEVICE if library.registered else told(*args)
    )
    with pytest.raises(contract.DeviceRefused):
        take(memory, shared[0][: 40 * PAGE])
    del shared[:]
    memory.look()
    assert memory.registered_bytes == 0 and not library.registered
