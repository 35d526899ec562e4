"""Movers: a layer's stretches of weights into a slot.

Owns the reads and the comparison with the checksums. Never chooses what is read, or where to. Invariant:
fill() returns only if the slot holds the bytes that were written when the checkpoint was rearranged; of files
that are read in place, the bytes that were read the first time.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvclient
from kvclient.errors import InvalidArgument, KVClientError

PAGE = 4096
DEPTH = 8  # reads of 4 MiB under way at one time
URGENT_BYTES = 1 << 20  # up to it a read goes before those of whole layers that wait: somebody computes on it


class StreamingFailed(KVClientError):
    """A layer's bytes could not be written or read, or are others; names file, layer and offset."""

    def __init__(self, path: str | os.PathLike[str], layer: int, offset: int, why: object) -> None:
        super().__init__(f"{path}, layer {layer}, offset {offset}: {why}")
        self.path, self.layer, self.offset = Path(path), layer, offset


@dataclass(frozen=True)
class Piece:
    """A part of a layer as it lies in the mover's file of that number: whole pages, of which the first `need`
    bytes (None: all) are there. crc: CRC32C of those; None: not known before they are read once.
    """

    offset: int
    length: int
    crc: int | None
    file: int = 0
    need: int | None = None

    @property
    def there(self) -> int:
        """How many of its bytes must be there before the layer runs."""
        return self.length if self.need is None else self.need


def _native() -> Any:
    """Only who reads from a disk needs it."""
    return importlib.import_module("kvclient._core")


def _opens_direct(path: Path) -> bool:
    """Whether its file system reads it past the page cache."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError:
        return False
    return True


def pages(length: int, huge: bool = True) -> memoryview:
    """Zeroed memory that begins with a page. huge: in few pages, which are less work for each read."""
    made = mmap.mmap(-1, max(PAGE, length), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        if huge:
            made.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(made)[:length]


def give_back(memory: memoryview) -> None:
    """The pages of pages(), whoever still has a view of them: it sees zeros."""
    made: Any = memory.obj
    made.madvise(mmap.MADV_DONTNEED)


class DiskMover:
    """From a rearranged checkpoint, or the files of one. O_DIRECT where the file system has it, so that no
    page is held twice; else reads whose pages are given back at once. Several reads are under way at one
    time; who waits for a layer computes its checksums meanwhile. faults: a schedule of what goes wrong
    (native/core/files/faults.h), for tests.
    """

    def __init__(self, *paths: str | os.PathLike[str], depth: int = DEPTH, faults: str = "") -> None:
        self.paths = [Path(path) for path in paths]
        self._fds: list[int] = []
        self._first: dict[Piece, int] = {}  # the checksums of pieces that came without
        self._closed = False
        try:
            self.direct = all(map(_opens_direct, self.paths))  # one way for all: the reader has one
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
            for path in self.paths:
                self._fds.append(os.open(path, flags))
            self._reader = _native().StretchReader(self.direct, depth, faults)
        except BaseException:
            for fd in self._fds:
                os.close(fd)
            raise

    @property
    def path(self) -> Path:
        """The first of its files."""
        return self.paths[0]

    @property
    def engine(self) -> str:
        """How it reads: by name."""
        return self._reader.engine

    def fill(self, layer: int, pieces: Sequence[Piece], slot: memoryview) -> None:
        """The pieces one behind the other. Raises StreamingFailed, and Closed."""
        if not pieces:
            return
        native = _native()
        asked = [
            native.Stretch(self._fds[part.file], part.offset, part.length, part.there) for part in pieces
        ]
        length = sum(part.length for part in pieces)
        found = self._reader.read(asked, slot[:length], length <= URGENT_BYTES)
        if isinstance(found, native.StretchFailure):
            piece = pieces[found.stretch]
            why = os.strerror(found.error) if found.error else self._ended(piece, found.offset)
            raise StreamingFailed(self.paths[piece.file], layer, found.offset, why)
        for piece, crc in zip(pieces, found, strict=True):
            if not self.direct:
                os.posix_fadvise(self._fds[piece.file], piece.offset, piece.length, os.POSIX_FADV_DONTNEED)
            wanted = piece.crc if piece.crc is not None else self._first.setdefault(piece, crc)
            _compare(self.paths[piece.file], layer, piece, crc, wanted)

    def _ended(self, piece: Piece, offset: int) -> str:
        return f"the file ends {piece.offset + piece.there - offset} bytes before the layer does"

    def close(self) -> None:
        """Also while others fill: they are told so."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        for fd in self._fds:
            os.close(fd)


class MemoryMover:
    """From the host's memory: `image` is the file's bytes, checked once for each piece that is computed from
    where it lies.
    """

    path = Path("memory")
    direct = False

    def __init__(self, image: bytes | memoryview) -> None:
        self._image = memoryview(image)
        self._checked: set[Piece] = set()

    def lies(self, layer: int, piece: Piece) -> memoryview:
        """The piece where it is, for whoever computes there. Raises StreamingFailed."""
        found = self._image[piece.offset : piece.offset + piece.length]
        if piece.crc is not None and piece not in self._checked:
            _compare(self.path, layer, piece, kvclient.crc32c(found[: piece.there]), piece.crc)
            self._checked.add(piece)
        return found

    def fill(self, layer: int, pieces: Sequence[Piece], slot: memoryview) -> None:
        """Copies a layer's pieces into the slot, one behind the other. Raises what a wrong checksum is."""
        at = 0
        for piece in pieces:
            into = slot[at : at + piece.length]
            into[:] = self._image[piece.offset : piece.offset + piece.length]
            if piece.crc is not None:
                _compare(self.path, layer, piece, kvclient.crc32c(into[: piece.there]), piece.crc)
            at += piece.length

    def close(self) -> None:
        """Nothing runs that must end."""


def host_memory(arranged: Any) -> MemoryMover:
    """The mover of an arrangement whose file is read into the host's memory first, whole: for a device that
    is not the host. Raises InvalidArgument for files that were not rearranged, OSError.
    """
    if arranged.in_place:
        raise InvalidArgument("rearrange=False; what lies in the host's memory is the rearranged file")
    path = arranged.paths[0]
    image = pages(path.stat().st_size)
    with open(path, "rb", buffering=0) as file:
        left = image
        while left and (got := file.readinto(left)):
            left = left[got:]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return MemoryMover(image)


def _compare(path: Path, layer: int, piece: Piece, crc: int, wanted: int) -> None:
    if crc == wanted:
        return
    why = f"the bytes are others than were written, CRC32C {crc:08x} and not {wanted:08x}"
    if piece.crc is None:
        why = f"the bytes are others than at the first read, CRC32C {crc:08x} and not {wanted:08x}"
        raise StreamingFailed(path, layer, piece.offset, f"{why}; load the checkpoint again")
    raise StreamingFailed(path, layer, piece.offset, f"{why}; remove the file and it is made anew")
