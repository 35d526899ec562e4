"""client="memory": a store inside this process, for who has no daemon, with a budget and, if wanted, a disk.

Owns the files of its directory, one a block. Never shares memory with another process; two that are given one
directory share its files, each complete or not there. Invariant: what is read back has the length, the layout
and the checksum it was written with, and its time is not over; or it is deleted and counts as a miss.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
import warnings
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

from kvclient.checks import check_bounds
from kvclient.errors import NoSpace
from kvclient.testing.in_memory import InMemoryClient
from kvclient.testing.in_memory_store import DISK, MISSING, InMemoryStore, Pin, Record, Session

VERSION = 2
SUFFIX = ".kv"
HEAD_BYTES = 8192  # of a file, at most, before its block
MEMORY_BYTES, DISK_BYTES = 1 << 30, 8 << 30
LEFT_OVER_S = 3600.0  # what is not written whole by then never will be


class InProcessStore(InMemoryStore):
    """Blocks that leave memory are written to the directory, and come back when they are asked for."""

    def __init__(self, memory_bytes: int, disk_dir: Path | None, disk_bytes: int) -> None:
        super().__init__(memory_bytes)
        check_bounds("disk_bytes", disk_bytes, 1 << 20, 1 << 50)
        self._disk_dir, self._disk_bytes = disk_dir, disk_bytes
        self._files: OrderedDict[bytes, int] = OrderedDict()  # key -> bytes; the first was used longest ago
        self.counts.update(disk_loaded=0, disk_written=0)
        if disk_dir is not None:
            disk_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.update(_listed(disk_dir))

    # ---------------------------------------------------------------- what the rules ask

    def state(self, key: bytes) -> int:
        found = super().state(key)
        return DISK if found == MISSING and key in self._files else found

    def pin(self, key: bytes, session: Session, follow: bool) -> Pin | str:
        if key in self._files and self._find(key) is None:
            self._load(key)
        return super().pin(key, session, follow)

    def evict(self, victim: Record) -> None:
        self._write(victim)
        super().evict(victim)

    def delete(self, key: bytes) -> bool:
        """Takes a sealed block away, from memory and its file; False if it is nowhere."""
        on_disk = key in self._files
        self._forget(key)
        return super().delete(key) or on_disk

    def stats(self) -> dict[str, int]:
        """Counts by name, the files' among them."""
        disk = {"disk_files": len(self._files), "disk_bytes": sum(self._files.values())}
        quota = self._disk_bytes if self._disk_dir is not None else 0
        return {**super().stats(), **disk, "disk_quota_bytes": quota}

    def keep(self) -> None:
        """Writes what is in memory only."""
        for record in list(self._records.values()):
            if record.sealed:
                self._write(record)

    def reset(self) -> int:
        """Deletes every sealed block, here and on the disk; says how many."""
        keys = {key for key, record in self._records.items() if record.sealed} | set(self._files)
        return sum([self.delete(key) for key in keys])

    # ---------------------------------------------------------------- files

    def _path(self, key: bytes) -> Path:
        assert self._disk_dir is not None
        return self._disk_dir / f"{key.hex()}{SUFFIX}"

    def _write(self, record: Record) -> None:
        if self._disk_dir is None or record.key in self._files or record.length > self._disk_bytes:
            return
        if (left_s := record.expires_at - time.monotonic()) <= 0:
            return
        body = self.readable[record.offset : record.offset + record.length].tobytes()
        fingerprint, parent = record.trace
        head = {
            "version": VERSION, "key": record.key.hex(),
            "layout": self.layouts[record.layout_id][0].hex(), "tokens": record.tokens,
            "base": record.base_position, "priority": record.priority, "fingerprint": fingerprint,
            "parent": parent.hex() if parent else None, "length": len(body),
            "expires": None if math.isinf(left_s) else time.time() + left_s,
        }  # fmt: skip
        line = json.dumps({**head, "crc": _crc(head, body)}).encode() + b"\n"
        path = self._path(record.key)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.touch(mode=0o600)  # a block holds its prompt's token ids: the user's, in any directory
            temporary.write_bytes(line + body)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            warnings.warn(f"a block cannot be kept in {self._disk_dir}: {error}", stacklevel=2)
            return
        self._files[record.key] = len(line) + len(body)
        self.counts["disk_written"] += 1
        while sum(self._files.values()) > self._disk_bytes:
            self._forget(next(iter(self._files)))

    def _load(self, key: bytes) -> None:
        self._files.move_to_end(key)
        try:
            head, body = self._read(key)
            layout_id = self.register_layout(bytes.fromhex(head["layout"]))
            if self.layouts[layout_id][1].length(head["tokens"]) != len(body):
                raise ValueError("its length is not that of its layout")
            parent = None if head["parent"] is None else bytes.fromhex(head["parent"])
            trace = (head["fingerprint"], parent)
            expires = head.get("expires")
            ttl_s = None if expires is None else expires - time.time()
            if ttl_s is not None and ttl_s <= 0:
                raise ValueError("its time is over")
            wanted = (layout_id, head["tokens"], head["base"], head["priority"], ttl_s, trace)
            record = self.create(self, key, *wanted)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, NoSpace):
            self._forget(key)  # damaged, or another's
            return
        if isinstance(record, Record):  # else there is no room for it now
            self.writable[record.offset : record.offset + record.length] = memoryview(body)
            self.seal(record)
            self.counts["disk_loaded"] += 1

    def _read(self, key: bytes) -> tuple[dict[str, Any], bytes]:
        with open(self._path(key), "rb") as file:
            head = json.loads(file.readline(HEAD_BYTES))
            body = file.read(self.capacity_bytes + 1)
        crc = head.pop("crc")
        told = (head["version"], head["key"], head["length"])
        if told != (VERSION, key.hex(), len(body)) or crc != _crc(head, body):
            raise ValueError("not as it was written")
        return head, body

    def _forget(self, key: bytes) -> None:
        if self._files.pop(key, None) is not None:
            self._path(key).unlink(missing_ok=True)


def _listed(place: Path) -> list[tuple[bytes, int]]:
    """Keys and bytes of the blocks that lie there, the one written longest ago first. Removes what a process
    that was killed left half written; another may add and take away meanwhile."""
    found = []
    for path in place.iterdir():
        with contextlib.suppress(OSError, ValueError):  # gone again; nobody's key
            about = path.lstat()
            if path.suffix == ".tmp" and len(path.name) > 64 and time.time() - about.st_mtime > LEFT_OVER_S:
                path.unlink()
            elif path.suffix == SUFFIX and len(path.stem) == 64 and stat.S_ISREG(about.st_mode):
                found.append((about.st_mtime_ns, bytes.fromhex(path.stem), about.st_size))
    return [(key, size) for _, key, size in sorted(found)]


def _crc(head: dict[str, Any], body: bytes) -> int:
    return zlib.crc32(json.dumps(head, sort_keys=True).encode(), zlib.crc32(body))


class InProcessClient(InMemoryClient):
    """The client of a store of this process's own. memory_bytes: the budget of its memory; disk_dir: where
    blocks go that leave it, and all when it is closed; disk_bytes: the budget of that.
    """

    def __init__(
        self, memory_bytes: int = MEMORY_BYTES, disk_dir: str | os.PathLike[str] | None = None,
        disk_bytes: int = DISK_BYTES,
    ) -> None:  # fmt: skip
        place = None if disk_dir is None else Path(disk_dir)
        self._own = InProcessStore(memory_bytes, place, disk_bytes)
        super().__init__(store=self._own)

    def reset(self) -> int:
        """Deletes every block, of memory and of the disk; says how many. Readers keep valid bytes."""
        with self._locked():
            return self._own.reset()

    def close(self) -> None:
        """Keeps what is in memory, if there is a disk. Idempotent."""
        if self.attached:
            with self._locked():
                self._own.keep()
        super().close()
