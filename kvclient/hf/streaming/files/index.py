"""The index of a rearranged checkpoint: what lies where, and its checksums.

Owns the names of its parts and what of it is believed. Never writes it (rearrange.py does). Invariant: an
index of another checkpoint, or one that does not fit its file, is none.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.hf.streaming.files.headers import TYPES
from kvclient.hf.streaming.mover import PAGE, Piece, StreamingFailed
from kvclient.hf.streaming.residency import PARTS

NAME = "kvstored-streaming"
VERSION = 3  # 3: packed words lie in panels
ALIGNMENT = 64  # of a tensor in its stretch
BLOCK_BYTES = 64 << 10  # of an embedding, with a checksum each: what is read for one token
# What a file raises that says anything: another shape, 1e999 for a number, a hundred thousand brackets.
NO_JSON = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
MOST_CRC = 0xFFFFFFFF
KINDS = dict(TYPES.values())  # bytes of an element, by torch's name of its type
_LAYER = re.compile(r"^(?P<list>.*?\.?(?:layers|h|blocks))\.(?P<number>\d+)\.(?P<rest>.+)$")
_FFN = re.compile(r"(^|\.)(mlp|feed_forward|ffn|block_sparse_moe)\.")


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a part's stretch."""

    name: str  # below the layer
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    panels: bool = False  # packed words in that order

    @property
    def unaligned(self) -> bool:
        """A product's last bits depend on where a matrix begins; packed words are read as they lie."""
        packed = self.name.endswith((".qweight", ".qzeros")) and self.offset % 4 == 0
        return self.offset % ALIGNMENT != 0 and not packed


@dataclass(frozen=True)
class Part:
    """pieces: read one behind the other; the tensors' offsets are in what was read."""

    pieces: tuple[Piece, ...]
    tensors: tuple[Stored, ...]

    @property
    def length(self) -> int:
        """Bytes of its pieces."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class Table:
    """A matrix with a row a token: of an embedding or a head. offset: of its stretch, rows one behind the
    other; pieces: of `rows` rows each, the last maybe fewer; blocks: CRC32C of each BLOCK_BYTES.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    offset: int
    length: int
    rows: int
    pieces: tuple[Piece, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """paths: the weights' files; layers: their parts by name; tables: by the name of their tensor. in_place:
    the files are the checkpoint's own, and tensors begin where they happen to.
    """

    paths: tuple[Path, ...]
    prefix: str
    layers: tuple[dict[str, Part], ...]
    tables: dict[str, Table]
    in_place: bool = False


def split(name: str) -> tuple[str, int, str] | None:
    """The layers' list, the number and the rest of a tensor's name; None outside of the layers."""
    found = _LAYER.match(name)
    return (found["list"], int(found["number"]), found["rest"]) if found else None


def part_of(rest: str) -> str:
    """The part of its layer that a tensor belongs to."""
    return "ffn" if _FFN.search(rest) else "attention"


def sources(home: Path) -> dict[str, list[int]]:
    """The checkpoint's files, and what tells that one is another now: its size and time.

    Raises InvalidArgument."""
    index = home / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"{index} has no weight_map that can be read: {error}") from error
    elif (home / "model.safetensors").is_file():
        names = ["model.safetensors"]  # not what lies beside it: an adapter, or a consolidated copy
    else:
        names = sorted(path.name for path in home.glob("*.safetensors"))
    if lost := [name for name in names if Path(name).name != name or not (home / name).is_file()]:
        raise InvalidArgument(f"{index}: {', '.join(map(repr, lost[:5]))}: no file of {home}")
    if not names:
        raise InvalidArgument(f"{home} has no safetensors")
    stats = {name: (home / name).stat() for name in names}
    return {name: [found.st_size, found.st_mtime_ns] for name, found in stats.items()}


def check_same(home: Path, was: Mapping[str, Any]) -> None:
    """was: sources() before its weights were read. Raises StreamingFailed that names a file which is another
    now: some weights may be of it, and the others of the one before.
    """
    if (now := sources(home)) == was:
        return
    name = next(name for name in (*was, *now) if was.get(name) != now.get(name))
    raise StreamingFailed(home / name, 0, 0, "it was replaced while it was read; load the checkpoint again")


# ---------------------------------------------------------------- reading the index


def read_index(home: Path, sources: Mapping[str, Any], wanted: tuple[str, ...]) -> Arrangement | None:
    """None: there is none, or not of this checkpoint, or it is damaged: made anew."""
    path = home / f"{NAME}.bin"
    try:
        index = json.loads((home / f"{NAME}.json").read_bytes())
        if index.pop("crc", (crc := checksum(index))) != crc:  # one of before has none
            return None
        if index["version"] != VERSION or index["sources"] != sources:
            return None
        layers = tuple({name: _part(part) for name, part in layer.items()} for layer in index["layers"])
        tables = {str(name): _table(str(name), entry) for name, entry in index["tables"].items()}
        pieces = [piece for layer in layers for part in layer.values() for piece in part.pieces]
        pieces += [piece for table in tables.values() for piece in table.pieces]
        if path.stat().st_size != max(piece.offset + piece.length for piece in pieces):
            return None
        if not set(wanted) <= set(tables) or any(set(layer) != set(PARTS) for layer in layers):
            return None
        return Arrangement((path,), str(index["prefix"]), layers, tables)
    except (OSError, *NO_JSON):
        return None


def checksum(index: dict[str, Any]) -> int:
    """CRC32C of what an index says, but for its "crc"."""
    said = {key: value for key, value in index.items() if key != "crc"}
    return kvclient.crc32c(json.dumps(said).encode())


def _piece(said: Any) -> Piece:
    piece = Piece(*map(int, said))
    if piece.offset < 0 or piece.offset % PAGE or piece.length % PAGE or piece.length <= 0:
        raise ValueError("a stretch of no whole pages")
    if piece.crc is None or not 0 <= piece.crc <= MOST_CRC or piece.file or piece.need is not None:
        raise ValueError("a stretch without its checksum, or of another file")
    return piece


def _part(said: dict[str, Any]) -> Part:
    piece = _piece(said["piece"])
    tensors = tuple(
        Stored(str(name), str(kind), tuple(map(int, shape)), int(offset), int(length), bool(panels))
        for name, kind, shape, offset, length, panels in said["tensors"]
    )
    if not all(t.offset >= 0 and t.length >= 0 and t.offset + t.length <= piece.length for t in tensors):
        raise ValueError("a tensor outside of its stretch")
    if not all(_bytes(t.dtype, t.shape) == t.length for t in tensors):
        raise ValueError("a tensor of another shape")
    return Part((piece,), tensors)


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Of a tensor. Raises KeyError for a type that is none, ValueError for a shape that is none."""
    if any(count < 0 for count in shape):
        raise ValueError("a shape that is none")
    return KINDS[kind] * math.prod(shape)


def _table(name: str, said: dict[str, Any]) -> Table:
    pieces = tuple(_piece(piece) for piece in said["pieces"])
    count, width = map(int, said["shape"])
    rows, length, offset = int(said["rows"]), int(said["length"]), pieces[0].offset
    for before, piece in itertools.pairwise(pieces):
        if piece.offset != before.offset + before.length:
            raise ValueError("a table with a hole")
    held = pieces[-1].offset + pieces[-1].length - offset
    if not 0 < length <= held or rows < 1 or -(-count // rows) != len(pieces):
        raise ValueError("a table of another size")
    if _bytes(str(said["dtype"]), (count, width)) != length:
        raise ValueError("a table of another shape")
    blocks = tuple(map(int, said["blocks"]))
    if len(blocks) != -(-held // BLOCK_BYTES):
        raise ValueError("a table without all of its checksums")
    return Table(name, str(said["dtype"]), (count, width), offset, length, rows, pieces, blocks)
