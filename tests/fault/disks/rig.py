"""A daemon with a disk tier, the blocks put into it, and what must hold after every failure.

Owns a directory of files and the list of keys that were ever put or deleted; never decides which failure
happens. Invariant: the bytes of a block are a function of its key, so whatever comes back is right or wrong
without doubt.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import grpc

from kvclient.errors import KVClientError
from kvclient.testing.conformance.case import check, fill, geometry, new_keys
from tests.descriptors import descriptors
from tests.fault.children import eventually

BLOCK = geometry(layers=8, heads=4, dim=64, tokens=32)  # 8 layers of 32 KiB: half a dozen pages each
PAGE = 4096
GONE = "gone"  # what state() says of a daemon that a schedule killed


class DiskRig:
    """`make` is the fixture `daemon`. Blocks are written at their second use (touch), fillers never."""

    def __init__(
        self, make: Any, directory: Path, faults: str = "", quota: str = "64MiB", args: tuple[str, ...] = (),
        memory: str = "16MiB", start: bool = True,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.keys: list[bytes] = []
        self.deleted: set[bytes] = set()
        flags = ("--disk", str(directory), "--disk-quota", quota, "--disk-write-priority", "100", *args)
        self.daemon = make(memory=memory, args=flags, env={"KVSTORED_FAULTS": faults}, start=start)
        self._client: Any = None
        self._door: Any = None
        self._asked = 0  # the process that the door leads to
        self.layout = 0

    # ------------------------------------------------------------ the daemon

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = self.daemon.connect()
            self.layout = self._client.register_layout(BLOCK.to_blob())
        return self._client

    def restart(self, faults: str = "", kill: bool = False, memory_too: bool = False) -> DiskRig:
        """Another daemon on the same directories. memory_too: the pool is lost, only the disk is left."""
        if self.daemon.process.poll() is None:
            self.daemon.kill() if kill else self.daemon.stop()
        self.drop_client()
        if memory_too:
            self.daemon._note_segments()
            for prefix in self.daemon._prefixes:
                for segment in Path("/dev/shm").glob(prefix + "*"):
                    segment.unlink()
            (self.daemon.dir / "state.json").unlink(missing_ok=True)
        self.daemon.env["KVSTORED_FAULTS"] = faults
        self.daemon.start()
        return self

    def drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None
        self._close_door()

    def was_killed(self) -> None:
        """Waits for the end that the schedule brought."""
        eventually(lambda: self.daemon.process.poll() is not None, f"the daemon ends\n{self.daemon.log()}")
        assert self.daemon.process.returncode == -9, self.daemon.log()

    # ------------------------------------------------------------ blocks

    def put(self, count: int, keys: list[bytes] | None = None, **options: Any) -> list[bytes]:
        keys = new_keys(count) if keys is None else keys
        self.keys += keys  # before: a daemon that dies may have sealed what it did not answer
        with self.client.create(keys, self.layout, **options) as writer:
            assert writer.results == ["granted"] * len(keys), writer.results
            for index in writer.granted:
                fill(writer[index], BLOCK.num_layers)
        self.deleted -= set(keys)
        return keys

    def put_on_disk(self, count: int) -> list[bytes]:
        """Puts and uses them a second time, and waits until nothing is to be written any more."""
        keys = self.put(count)
        self.client.touch(keys)
        self.settled()
        return keys

    def evict(self) -> None:
        """Pushes everything out of memory with blocks that are never written."""
        with contextlib.closing(self.daemon.connect()) as other:
            fillers = new_keys(80)
            layout = other.register_layout(BLOCK.to_blob())
            for at in range(0, len(fillers), 16):
                other.create(fillers[at : at + 16], layout, priority=99).seal(zero_rest=True)
            other.delete(fillers)

    def delete(self, keys: list[bytes]) -> int:
        count = self.client.delete(keys)
        self.deleted |= set(keys)
        return count

    def load(self, keys: list[bytes], wait_s: float = 10.0, **options: Any) -> list[bool]:
        """Which of them are hits, each with the right bytes; of what was deleted none."""
        hits = []
        for at in range(0, len(keys), 8):  # never more at once than the memory holds
            part = keys[at : at + 8]
            with self.client.get(part, wait_s=wait_s, **options) as blocks:
                for key, block in zip(part, blocks, strict=True):
                    assert block is None or key not in self.deleted, "a deleted block came back"
                    if block is not None:
                        assert block.key == key
                        check(block, BLOCK.num_layers)
                    hits.append(block is not None)
                    del block
        return hits

    # ------------------------------------------------------------ what is there

    def counters(self) -> dict[str, int]:
        return dict(self._stats().namespaces[0].counters)

    def states(self) -> set[str]:
        """The degraded states that hold."""
        return {problem.state for problem in self._stats().degraded}

    def flush(self) -> None:
        self._admin("Flush")

    def _stats(self) -> Any:
        return self._admin("Stats")

    def _admin(self, call: str) -> Any:
        from kvstored.v1 import admin_pb2
        from tests.conformance.grpc_door import GrpcClient

        if self._asked != self.daemon.pid:  # opening a channel costs most
            self._close_door()
            self._door, self._asked = GrpcClient(str(self.daemon.dir / "grpc.sock")), self.daemon.pid
        request = getattr(admin_pb2, f"{call}Request")(namespace="default")
        return getattr(self._door.admin, call)(request, timeout=30)

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
        self._door, self._asked = None, 0

    def settled(self) -> None:
        """Nothing waits to be written or loaded."""
        names = ["disk_loads_in_flight", "disk_loads_waiting", "disk_writes_in_flight", "disk_indexing"]
        eventually(
            lambda: not any(map(self.counters().get, [*names, "pending_writes"])),
            "the disk tier has nothing to do",
        )

    def files(self) -> list[Path]:
        return [path for path in self.directory.rglob("*.kv") if path.is_file()]

    def temporary(self) -> list[Path]:
        return list(self.directory.rglob("*.tmp"))

    def file_of(self, key: bytes) -> Path:
        return next(path for path in self.files() if path.name == key.hex() + ".kv")

    def bytes_on_disk(self) -> int:
        sizes = []
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):  # the daemon removes files meanwhile
                sizes.append(path.stat().st_size)
        return sum((size + PAGE - 1) // PAGE * PAGE for size in sizes)

    def open_files(self) -> list[str]:
        """Descriptors of the daemon below the directory that are not its locks."""
        found = descriptors(self.daemon.pid)
        return [file for file in found if str(self.directory) in file and (".kv" in file or ".tmp" in file)]

    # ------------------------------------------------------------ what must hold

    def sound(self, integrity: Any) -> int:
        """Every block ever put is a miss or right, what is counted is there, and all can be given back.
        Says how many were hits."""
        self.settled()
        hits = sum(self.load(list(dict.fromkeys(self.keys))))
        self.settled()
        self.counted_right()
        integrity(self.daemon)
        self.serves()
        eventually(lambda: not self.open_files(), "no descriptor of a file is left open")
        self.gives_all_back(integrity)
        return hits

    def counted_right(self) -> None:
        """The quota holds, and the files' bytes and number are what the statistics say."""
        now: dict[str, int] = {}

        def agree() -> bool:
            now.update(self.counters(), found=self.bytes_on_disk(), names=len(self.files()))
            return now["disk_bytes"] == now["found"] and now["disk_files"] == now["names"]

        eventually(agree, f"the statistics agree with the directory: {now}")
        assert now["disk_bytes"] <= now["disk_quota_bytes"], now
        eventually(lambda: not self.temporary(), "no temporary file is left")

    def serves(self) -> None:
        """Create, seal, get and delete work."""
        keys = self.put(2)
        assert self.load(keys) == [True, True]
        assert self.delete(keys) == 2
        assert self.load(keys, wait_s=0.1) == [False, False]

    def gives_all_back(self, integrity: Any) -> None:
        """After deleting everything no byte is in use, in memory or on disk, and no pin."""
        gc.collect()
        self.client.delete(list(dict.fromkeys(self.keys)))
        eventually(lambda: self.client.stats()["pins"] == 0, "no pin is left")
        now: dict[str, int] = {}

        def nothing() -> bool:
            now.update(self.counters())
            return not (now["used_bytes"] or now["on_disk"] or now["disk_bytes"] or self.files())

        eventually(nothing, f"no byte is in use, in memory or on disk: {now}")
        integrity(self.daemon)


@contextlib.contextmanager
def tolerated() -> Any:
    """The store may be away at any moment of this."""
    with contextlib.suppress(KVClientError, grpc.RpcError):
        yield
