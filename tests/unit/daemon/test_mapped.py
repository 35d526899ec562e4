"""Goal: where a transfer of the pool failed, nothing of the fabric's process writes into the daemon's memory
any more, however late. Method: a real memory file, and the kernel writing to the address as a socket would.
"""

import ctypes
import os

import pytest

from kvstored.cluster.mooncake import Extent, Mapped

LENGTH = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def extent():
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 4 * LENGTH)
    yield Extent(fd, LENGTH, LENGTH)
    os.close(fd)


def received(address: int) -> int:
    """Bytes that the kernel could put there."""
    reading, writing = os.pipe()
    os.write(writing, b"late")
    got = libc.read(reading, ctypes.c_void_p(address), 4)
    os.close(reading)
    os.close(writing)
    return got


def test_a_transfer_fills_its_extent(extent):
    assert Mapped().fill(extent, lambda to: received(to) == 4)
    assert os.pread(extent.fd, 4, extent.offset) == b"late"


def test_where_one_failed_nothing_lands_and_nothing_is_mapped_again(extent):
    mapped, barred = Mapped(), []
    assert not mapped.fill(extent, lambda to: barred.append(to) or False)

    def fails(to):
        barred.append(to)
        raise RuntimeError("Mooncake")

    with pytest.raises(RuntimeError):
        mapped.fill(extent, fails)
    for _ in range(8):
        assert mapped.fill(extent, lambda to: all(abs(to - lost) >= LENGTH for lost in barred))
    assert [received(lost) for lost in barred] == [-1, -1]
    assert os.pread(extent.fd, LENGTH, extent.offset) == bytes(LENGTH)


def test_one_that_failed_keeps_no_descriptor(extent):
    mapped = Mapped()
    before = os.listdir("/proc/self/fd")
    for _ in range(64):
        assert not mapped.fill(extent, lambda to: False)
        assert mapped.fill(extent, lambda to: True)
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_the_pool_does_not_have_any_more_is_not_mapped(extent):
    os.ftruncate(extent.fd, LENGTH)
    with pytest.raises(OSError):
        Mapped().fill(extent, lambda to: True)
