"""Checksums and copies from Python: the right bytes, the right CRC32C, and errors that name the sizes.

Method: known check values of CRC32C, a bitwise reference, and every kind of buffer a caller may have.
The inner paths and alignments are native/tests/checksum_test.cc and copy_test.cc.
"""

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient import copy_into, crc32c
from kvclient.errors import InvalidArgument


def reference(data, crc=0):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720 B.4, and the check value of the CRC catalogue
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_known_values(data, crc):
    assert crc32c(data) == crc == reference(data)


@settings(deadline=None)
@given(st.binary(max_size=600), st.integers(0, 600))
def test_goes_on_from_a_value(data, cut):
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data) == reference(data)


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 100_001, (4 << 20) + 3])
@pytest.mark.parametrize("offset", [0, 1, 8, 63])
def test_copies_and_checksums(size, offset):
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    for checksum in (True, False):
        room = np.full(size + 192, 0xEE, np.uint8)
        target = room[64 + offset : 64 + offset + size]
        assert copy_into(target, source, checksum) == (crc32c(source) if checksum else None)
        assert np.array_equal(target, source)
        assert (room[: 64 + offset] == 0xEE).all() and (room[64 + offset + size :] == 0xEE).all()


def test_all_kinds_of_buffers():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(512, dtype=torch.bfloat16).reshape(2, 256)
    data = bytes(tensor.view(torch.uint8).numpy())
    for source in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint16), tensor):
        with mmap.mmap(-1, 1024) as mapped:
            half = torch.zeros(512, dtype=torch.float16)
            for target in (bytearray(1024), mapped, np.zeros((8, 64), np.uint16), half):
                assert copy_into(target, source) == crc32c(source) == crc32c(data)
                stored = target.numpy() if isinstance(target, torch.Tensor) else target
                assert bytes(stored) == data if not isinstance(stored, mmap.mmap) else stored[:] == data


@pytest.mark.parametrize(
    ("target", "source", "text"),
    [
        (bytearray(5), bytes(6), "dst has 5 bytes and src 6; they must be equal"),
        (bytes(6), bytes(6), "dst of type bytes is not a contiguous writable buffer in CPU memory"),
        (np.zeros(12, np.uint8)[::2], bytes(6), "dst of type numpy.ndarray is not a contiguous writable"),
        (bytearray(6), np.zeros(12, np.uint8)[::2], "src of type numpy.ndarray is not a contiguous buffer"),
        (bytearray(6), "string", "src of type str"),
        (bytearray(6), None, "src of type NoneType"),
    ],
)
def test_errors(target, source, text):
    with pytest.raises(InvalidArgument, match=text):
        copy_into(target, source)


def test_read_only_and_overlapping_arrays():
    array = np.zeros(100, np.uint8)
    with pytest.raises(InvalidArgument, match="dst and src overlap"):
        copy_into(array[:60], array[40:])
    copy_into(array[:50], array[50:])
    array.flags.writeable = False
    with pytest.raises(InvalidArgument, match="writable"):
        copy_into(array, bytes(100))
    with pytest.raises(InvalidArgument, match="data of type int"):
        crc32c(7)
