"""Movers: a layer's stretch of weights into a slot.

Owns the reads and the comparison with the checksums. Never chooses what is read, or where to. Invariant:
fill() returns only if the slot holds the bytes that were written when the checkpoint was rearranged.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kvclient
from kvclient.errors import KVClientError

PAGE = 4096
CHUNK_BYTES = 16 << 20  # of one read


class StreamingFailed(KVClientError):
    """A layer's bytes could not be written or read, or are others; names file, layer and offset."""

    def __init__(self, path: str | os.PathLike[str], layer: int, offset: int, why: object) -> None:
        super().__init__(f"{path}, layer {layer}, offset {offset}: {why}")
        self.path, self.layer, self.offset = Path(path), layer, offset


@dataclass(frozen=True)
class Piece:
    """A part of a layer as it lies in the file: whole pages; crc: CRC32C of them."""

    offset: int
    length: int
    crc: int


def pages(length: int) -> memoryview:
    """Zeroed memory that begins with a page."""
    return memoryview(mmap.mmap(-1, max(PAGE, length)))[:length]


class DiskMover:
    """From a rearranged checkpoint. O_DIRECT where the file system has it, so that no page is held twice;
    else reads whose pages are given back at once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd, self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), True
        except OSError:
            self._fd, self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False

    def fill(self, layer: int, pieces: Sequence[Piece], slot: memoryview) -> None:
        """The pieces one behind the other. Raises StreamingFailed."""
        at = 0
        for piece in pieces:
            self._read(layer, piece, slot[at : at + piece.length])
            _compare(self.path, layer, piece, slot[at : at + piece.length])
            at += piece.length

    def _read(self, layer: int, piece: Piece, into: memoryview) -> None:
        done = 0
        while done < piece.length:
            try:
                got = os.preadv(self._fd, [into[done : done + CHUNK_BYTES]], piece.offset + done)
            except OSError as error:
                raise StreamingFailed(self.path, layer, piece.offset + done, error.strerror) from error
            if got == 0:
                short = f"the file ends {piece.length - done} bytes before the layer does"
                raise StreamingFailed(self.path, layer, piece.offset + done, short)
            done += got
        if not self.direct:
            os.posix_fadvise(self._fd, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


class MemoryMover:
    """From memory, for tests: `image` is the file's bytes."""

    path = Path("memory")
    direct = False

    def __init__(self, image: bytes | memoryview) -> None:
        self._image = memoryview(image)

    def fill(self, layer: int, pieces: Sequence[Piece], slot: memoryview) -> None:
        at = 0
        for piece in pieces:
            slot[at : at + piece.length] = self._image[piece.offset : piece.offset + piece.length]
            _compare(self.path, layer, piece, slot[at : at + piece.length])
            at += piece.length

    def close(self) -> None:
        self._image.release()


def _compare(path: Path, layer: int, piece: Piece, found: memoryview) -> None:
    if (crc := kvclient.crc32c(found)) != piece.crc:
        why = f"the bytes are others than were written, CRC32C {crc:08x} and not {piece.crc:08x}"
        raise StreamingFailed(path, layer, piece.offset, f"{why}; remove the file and it is made anew")
