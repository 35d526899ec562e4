"""A checkpoint's weights, written once more: each part of a layer in one stretch of whole pages, checksummed.

Goes on where a killed process stopped. Owns the unfinished file and its journal: a line for each stretch that
was written, with its checksum. Never believes either: what is taken over is read and compared. Invariant: the
finished file is at its place, and on the disk, before its index is; of two processes that want it at once one
waits for the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.hf.awq.packing import fits_panels, to_panels
from kvclient.hf.streaming.files.headers import Source, tensors
from kvclient.hf.streaming.files.index import (
    ALIGNMENT,
    BLOCK_BYTES,
    NAME,
    NO_JSON,
    VERSION,
    Arrangement,
    check_same,
    checksum,
    part_of,
    read_index,
    sources,
    split,
)
from kvclient.hf.streaming.mover import PAGE, StreamingFailed
from kvclient.hf.streaming.residency import PARTS

PIECE_BYTES = 64 << 20  # of a table, at most about


@dataclass(frozen=True)
class _Stretch:
    """key: what it is; layer: for errors; made: its bytes, and what the index says of it."""

    key: list[Any]
    layer: int
    bytes: int
    made: Callable[[], tuple[bytearray, Any]]


def arrangement(
    home: Path, tables: tuple[str, ...] = (), progress: Callable[[int, int], None] | None = None
) -> Arrangement:
    """Reads it, or makes it first. tables: the tensors with a row a token; progress: told of bytes written
    and of all. Raises StreamingFailed for what the disk refuses, InvalidArgument for a checkpoint without
    layers.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(home / f"{NAME}.lock", "w"))
        except OSError as error:  # a directory that cannot be written may have been rearranged before
            if (found := read_index(home, sources(home), tables)) is not None:
                return found
            why = f"{error.strerror}; StreamingConfig(rearrange=False) reads the checkpoint where it lies"
            raise StreamingFailed(home / f"{NAME}.lock", 0, 0, why) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        source_files = sources(home)
        found = read_index(home, source_files, tables)
        if found is None:
            _rewrite(home, source_files, tables, progress)
            found = read_index(home, source_files, tables)
        if found is None:
            raise StreamingFailed(home / f"{NAME}.json", 0, 0, "it was changed as soon as it was written")
        return found


def _rewrite(
    home: Path, sources: Mapping[str, Any], tables: Sequence[str],
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Raises InvalidArgument, StreamingFailed."""
    found = tensors(home, sources)
    prefix, layers = layers_of(home, found)
    stretches = [
        _Stretch(["layer", number, part], number, *_part(tensors, part))
        for number, tensors in enumerate(layers)
        for part in PARTS
    ]
    if lost := [name for name in tables if name not in found or len(found[name].shape) != 2]:
        raise InvalidArgument(f"{home.name} has no {lost[0]}, or it is no matrix")
    most = min(PIECE_BYTES, max(sum(source.length for source in tensors.values()) for tensors in layers))
    rows = {name: _rows(found[name], most) for name in tables}
    for name in tables:
        stretches += _pieces(name, found[name], rows[name], len(layers))
    said = []
    with _Unfinished(home, sources) as out:
        done, whole = 0, sum(stretch.bytes for stretch in stretches)
        for stretch in stretches:
            said.append(out.kept(stretch) or out.write(stretch))
            done += stretch.bytes
            if progress is not None:
                progress(done, whole)
        check_same(home, sources)
        out.finish()
    index: dict[str, Any] = {"version": VERSION, "sources": sources, "prefix": prefix}
    index["layers"] = [dict[str, Any]() for _ in layers]
    index["tables"] = {name: _table(found[name], rows[name]) for name in tables}
    for key, piece, more in said:
        if key[0] == "layer":
            index["layers"][key[1]][key[2]] = {"piece": piece, "tensors": more}
        else:
            index["tables"][key[1]]["pieces"].append(piece)
            index["tables"][key[1]]["blocks"] += more
    _replace(home / f"{NAME}.json", json.dumps(index | {"crc": checksum(index)}).encode())


def layers_of(home: Path, found: Mapping[str, Source]) -> tuple[str, list[dict[str, Source]]]:
    """The list's name, and each layer's tensors by their names in it. Raises InvalidArgument."""
    where: dict[tuple[str, int], dict[str, Source]] = {}
    for key, source in found.items():
        if (name := split(key)) is not None:
            where.setdefault(name[:2], {})[name[2]] = source
    lists = {prefix for prefix, _ in where}
    if len(lists) != 1 or sorted(n for _, n in where) != list(range(len(where))):
        raise InvalidArgument(f"{home.name} has no one list of layers: {', '.join(sorted(lists)) or 'none'}")
    prefix = lists.pop()
    return prefix, [where[prefix, number] for number in range(len(where))]


def _part(layer: Mapping[str, Source], part: str) -> tuple[int, Callable[[], tuple[bytearray, Any]]]:
    names = sorted(name for name in layer if part_of(name) == part)

    def made() -> tuple[bytearray, Any]:
        data, said = bytearray(), []
        for name in names:
            source = layer[name]
            held: Any = source.read()
            if name.endswith(".scales"):
                check_finite(source, held)
            if panels := _fits_panels(name, layer):
                words = torch.frombuffer(held, dtype=torch.int32).view(source.shape)
                held = to_panels(words).view(-1).view(torch.uint8).numpy().data
            data.extend(bytes(-len(data) % ALIGNMENT))
            said.append([name, source.dtype, list(source.shape), len(data), len(held), panels])
            data += held
        data.extend(bytes(-len(data) % PAGE or (0 if data else PAGE)))
        return data, said

    return sum(layer[name].length for name in names), made


def _fits_panels(name: str, layer: Mapping[str, Source]) -> bool:
    """Whether these are packed words that native/cpu takes in panels: by their groups."""
    source, scales = layer[name], layer.get(f"{name.removesuffix('.qweight')}.scales")
    if not name.endswith(".qweight") or scales is None or source.dtype != "int32":
        return False
    if len(source.shape) != 2 or not all(source.shape) or len(scales.shape) != 2 or not scales.shape[0]:
        return False
    return fits_panels(source.shape[0] // scales.shape[0])


def check_finite(source: Source, held: bytearray) -> None:
    """Raises InvalidArgument that names the tensor and the value."""
    if source.dtype in ("float16", "float32"):
        scales = np.frombuffer(held, source.dtype)
        if not np.isfinite(scales).all():
            wrong = scales[~np.isfinite(scales)][0]
            raise InvalidArgument(f"{source.name} has {wrong}; all must be finite")


def _rows(source: Source, most: int) -> int:
    """Of a piece of about so many bytes, no more than a layer's slot has: as many as fill whole blocks."""
    if not all(source.shape):
        raise InvalidArgument(f"a table of {list(source.shape)} in {source.path.name}")
    width = source.length // source.shape[0]
    step = BLOCK_BYTES // gcd(width, BLOCK_BYTES)
    return max(step, most // width // step * step)


def _pieces(name: str, source: Source, rows: int, layer: int) -> Iterator[_Stretch]:
    width = source.length // source.shape[0]
    for start in range(0, source.shape[0], rows):
        first, last = start * width, min(source.shape[0], start + rows) * width

        def made(first: int = first, last: int = last) -> tuple[bytearray, Any]:
            data = source.read(first, last)
            data.extend(bytes(-len(data) % PAGE))
            view = memoryview(data)
            return data, [
                kvclient.crc32c(view[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)
            ]

        yield _Stretch(["table", name, start], layer, last - first, made)


def _table(source: Source, rows: int) -> dict[str, Any]:
    shape = {"dtype": source.dtype, "shape": list(source.shape), "length": source.length}
    return {**shape, "rows": rows, "pieces": [], "blocks": []}


class _Unfinished:
    """The file as it grows. A killed process leaves it; one that fails takes it away."""

    def __init__(self, home: Path, sources: Mapping[str, Any]) -> None:
        self._final, self._path = home / f"{NAME}.bin", home / f"{NAME}.bin.part"
        self._journal_path = home / f"{NAME}.journal"
        self._head = {"version": VERSION, "sources": sources}
        self._kept: list[Any] = []

    def __enter__(self) -> _Unfinished:
        with contextlib.suppress(OSError, *NO_JSON):
            self._kept = self._believed(self._journal_path.read_text().splitlines())
        try:
            mode = "r+b" if self._kept else "wb"
            self._file = open(self._path, mode, buffering=0)
            end = sum(self._kept[-1][1][:2]) if self._kept else 0
            self._file.truncate(end)
            self._file.seek(end)
            self._journal = open(self._journal_path, "w", buffering=1)
            for line in [self._head, *self._kept]:
                self._journal.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StreamingFailed(self._path, 0, 0, error.strerror) from error
        self._kept.reverse()
        return self

    def _believed(self, lines: list[str]) -> list[Any]:
        """Of what the journal says the stretches that are there, byte for byte."""
        if json.loads(lines[0]) != json.loads(json.dumps(self._head)):
            return []
        found: list[Any] = []
        with open(self._path, "rb") as file:
            at, whole = 0, os.fstat(file.fileno()).st_size
            for line in lines[1:]:
                try:
                    key, (offset, length, crc), more = json.loads(line)
                except ValueError:  # killed in the middle of a line
                    break
                if offset != at or not 0 < length <= whole - at or kvclient.crc32c(file.read(length)) != crc:
                    break
                found.append([key, [offset, length, crc], more])
                at += length
        return found

    def kept(self, stretch: _Stretch) -> Any:
        """What the journal has of it; None: it is to be written."""
        if self._kept and self._kept[-1][0] == stretch.key:
            return self._kept.pop()
        return None

    def write(self, stretch: _Stretch) -> Any:
        assert not self._kept, "stretches are written in their order"
        data, more = stretch.made()
        begin = self._file.tell()
        try:
            left = memoryview(data)
            while left:  # a write takes less than all: near a full disk, or of more than 2 GiB
                left = left[self._file.write(left) :]
            os.posix_fadvise(self._file.fileno(), begin, len(data), os.POSIX_FADV_DONTNEED)
            line = [stretch.key, [begin, len(data), kvclient.crc32c(data)], more]
            self._journal.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StreamingFailed(self._path, stretch.layer, begin, error.strerror) from error
        return line

    def finish(self) -> None:
        try:
            os.fsync(self._file.fileno())
            os.replace(self._path, self._final)
        except OSError as error:
            raise StreamingFailed(self._path, 0, 0, error.strerror) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self._journal.close()
        if kind is None or issubclass(kind, Exception):  # after Ctrl-C it can go on
            for path in (self._path, self._journal_path):
                path.unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as raw:
            raw.write(data)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StreamingFailed(path, 0, 0, error.strerror) from error
