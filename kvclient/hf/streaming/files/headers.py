"""The headers of safetensors files: where each tensor lies.

Owns the parsing and its bounds. Never reads a weight. Invariant: whatever a file says, what is returned lies
inside of it, does not overlap, and has as many bytes as its shape needs; else an InvalidArgument names it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import InvalidArgument

MOST_HEADER_BYTES = 100 << 20  # the format's own limit
MOST_DIMENSIONS, MOST_SIZE = 8, 1 << 40
TYPES = {  # as torch calls them, and their bytes
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A tensor in a checkpoint: offset and length in bytes of its file; dtype as torch calls it."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def read(self, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes start..stop of it. Raises InvalidArgument if the file ends before, OSError."""
        found = bytearray((self.length if stop is None else stop) - start)
        self.read_into(memoryview(found), start)
        return found

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """As many bytes of it as the memory has, and no page of the file is kept for them. Raises
        InvalidArgument if the file ends before.
        """
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + start)
            left = memory
            while left:
                if not (got := file.readinto(left)):
                    raise InvalidArgument(f"{self.path} ends inside of {self.name}")
                left = left[got:]
            os.posix_fadvise(file.fileno(), self.offset + start, len(memory), os.POSIX_FADV_DONTNEED)


def tensors(home: Path, names: Mapping[str, Any]) -> dict[str, Source]:
    """Of these files of a checkpoint. Raises InvalidArgument with what is wrong with one."""
    found: dict[str, Source] = {}
    for name in names:
        for key, source in header(home / name).items():
            if key in found:
                raise InvalidArgument(f"{key} is in {found[key].path.name} and in {name}")
            found[key] = source
    return found


def header(path: Path) -> dict[str, Source]:
    """Of one file. Raises InvalidArgument."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
                raise InvalidArgument(f"{path.name} says {length} bytes of header and has {size} in all")
            said = json.loads(file.read(length))
    except OSError as error:
        raise InvalidArgument(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path.name} has no header that can be read: {error}") from error
    if not isinstance(said, dict):
        raise InvalidArgument(f"{path.name} has a header that is no object")
    found = {
        key: _source(path, key, entry, 8 + length, size)
        for key, entry in said.items()
        if key != "__metadata__"
    }
    end = 8 + length
    for key, source in sorted(found.items(), key=lambda item: (item[1].offset, item[1].length)):
        if source.offset < end and source.length:
            raise InvalidArgument(f"{path.name}: {key} lies inside of another tensor")
        end = max(end, source.offset + source.length)
    return found


def _source(path: Path, key: str, said: Any, begin: int, size: int) -> Source:
    entry = said if isinstance(said, dict) else {}
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in TYPES:
        raise InvalidArgument(f"{path.name}: {key} has dtype {kind!s:.40}; known are {', '.join(TYPES)}")
    if not _counts(shape, MOST_DIMENSIONS):
        raise InvalidArgument(f"{path.name}: {key} has shape {shape!s:.80}")
    if not (_counts(offsets, 2) and len(offsets) == 2 and offsets[0] <= offsets[1] <= size - begin):
        raise InvalidArgument(f"{path.name}: {key} lies at {offsets!s:.80} of {size - begin} bytes")
    name, width = TYPES[kind]
    length = offsets[1] - offsets[0]
    if math.prod(shape) * width != length:
        raise InvalidArgument(f"{path.name}: {key} is {kind}{shape} in {length} bytes")
    return Source(key, path, name, tuple(shape), begin + offsets[0], length)


def _counts(value: Any, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(count) is int and 0 <= count <= MOST_SIZE for count in value)
    )
