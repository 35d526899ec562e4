"""A checkpoint's layers, written once more: each part of a layer in one stretch of whole pages, checksummed.

Owns the two files it writes beside the checkpoint. Never changes the checkpoint, and never reads one that was
changed since. Invariant: the index is there only when all of the weights' file is, so whoever is killed while
writing leaves nothing that is read; of two that write at once one waits for the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.hf.streaming.mover import PAGE, Piece, StreamingFailed
from kvclient.hf.streaming.residency import PARTS

NAME = "kvstored-streaming"
VERSION = 1
ALIGNMENT = 64  # of a tensor in its stretch
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


@dataclass(frozen=True)
class Part:
    piece: Piece
    tensors: tuple[Stored, ...]


@dataclass(frozen=True)
class Arrangement:
    """path: the weights' file; layers: their parts by name; digest: SHA-256 of all that is in it."""

    path: Path
    prefix: str
    layers: tuple[dict[str, Part], ...]
    digest: bytes


def split(name: str) -> tuple[str, int, str] | None:
    """The layers' list, the number and the rest of a tensor's name; None outside of the layers."""
    found = _LAYER.match(name)
    return (found["list"], int(found["number"]), found["rest"]) if found else None


def arrangement(home: Path, progress: Callable[[int, int], None] | None = None) -> Arrangement:
    """Reads it, or makes it first. progress: told of layers written and of all. Raises StreamingFailed for
    what the disk refuses, InvalidArgument for a checkpoint without layers.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(home / f"{NAME}.lock", "w"))
        except OSError as error:
            raise StreamingFailed(home / f"{NAME}.lock", 0, 0, error.strerror) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        source_files = sources(home)
        found = _read(home, source_files)
        if found is None:
            _write(home, source_files, progress)
            found = _read(home, source_files)
        if found is None:
            raise StreamingFailed(home / f"{NAME}.json", 0, 0, "it was changed as soon as it was written")
        return found


def sources(home: Path) -> dict[str, list[int]]:
    """The checkpoint's files, and what tells that one is another now: its size and time.

    Raises InvalidArgument."""
    index = home / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def _read(home: Path, sources: dict[str, list[int]]) -> Arrangement | None:
    path = home / f"{NAME}.bin"
    try:
        index = json.loads((home / f"{NAME}.json").read_bytes())
        if index["version"] != VERSION or index["sources"] != sources:
            return None
        layers = tuple({name: _part(part) for name, part in layer.items()} for layer in index["layers"])
        end = max(part.piece.offset + part.piece.length for layer in layers for part in layer.values())
        if path.stat().st_size != end:
            return None
        return Arrangement(path, str(index["prefix"]), layers, bytes.fromhex(index["digest"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # made anew


def _part(said: dict[str, Any]) -> Part:
    piece = Piece(*map(int, said["piece"]))
    stored = (Stored(str(n), str(d), tuple(map(int, s)), int(o), int(b)) for n, d, s, o, b in said["tensors"])
    tensors = tuple(stored)
    inside = all(t.offset >= 0 and t.length >= 0 and t.offset + t.length <= piece.length for t in tensors)
    if not inside or piece.offset % PAGE or piece.length % PAGE or piece.length <= 0:
        raise ValueError("a tensor outside of its stretch")
    return Part(piece, tensors)


def _write(home: Path, sources: dict[str, list[int]], progress: Callable[[int, int], None] | None) -> None:
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        where: dict[tuple[str, int], dict[str, tuple[Any, str]]] = {}
        for name in sources:
            file = stack.enter_context(safe_open(home / name, framework="pt"))
            for key in list(file.keys()):
                if (found := split(key)) is not None:
                    where.setdefault(found[:2], {})[found[2]] = (file, key)
        lists = {prefix for prefix, _ in where}
        if len(lists) != 1 or sorted(n for _, n in where) != list(range(len(where))):
            raise InvalidArgument(
                f"{home.name} has no one list of layers: {', '.join(sorted(lists)) or 'none'}"
            )
        prefix, digest, layers = lists.pop(), hashlib.sha256(), []
        with _replacing(home / f"{NAME}.bin") as out:
            for number in range(len(where)):
                layers.append(dict(_layer(out, number, where[prefix, number], digest)))
                if progress is not None:
                    progress(number + 1, len(where))
    index = {"version": VERSION, "sources": sources, "prefix": prefix, "digest": digest.hexdigest()}
    with _replacing(home / f"{NAME}.json") as out:
        out.write(json.dumps({**index, "layers": layers}).encode())


def _layer(
    out: Any, number: int, tensors: dict[str, tuple[Any, str]], digest: Any
) -> Iterator[tuple[str, Any]]:
    for part in PARTS:
        own = sorted(name for name in tensors if bool(_FFN.search(name)) == (part == "ffn"))
        data, said, begin = bytearray(), [], out.tell()
        for name in own:
            file, key = tensors[name]
            tensor = file.get_tensor(key).contiguous()
            if name.endswith(".scales") and not bool(tensor.isfinite().all()):
                raise InvalidArgument(f"{key} has {float(tensor[~tensor.isfinite()][0])}; all must be finite")
            data.extend(bytes(-len(data) % ALIGNMENT))
            held = tensor.flatten().view(_bytes()).numpy()
            kind = str(tensor.dtype).removeprefix("torch.")
            said.append([name, kind, list(tensor.shape), len(data), held.nbytes])
            digest.update(f"{number} {name} {kind} {list(tensor.shape)}\n".encode())
            digest.update(held)
            data.extend(held.data)
        data.extend(bytes(-len(data) % PAGE or (0 if data else PAGE)))
        try:
            left = memoryview(data)
            while left:  # a write takes less than all: near a full disk, or of more than 2 GiB
                left = left[out.write(left) :]
        except OSError as error:
            raise StreamingFailed(out.name, number, begin, error.strerror) from error
        yield part, {"piece": [begin, len(data), kvclient.crc32c(data)], "tensors": said}


def _bytes() -> Any:
    import torch

    return torch.uint8


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A file that is at its place, and on the disk, only when it is whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb", buffering=0) as raw:
            yield raw
            os.fsync(raw.fileno())
        os.replace(part, path)
    except OSError as error:
        raise StreamingFailed(path, 0, 0, error.strerror) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
