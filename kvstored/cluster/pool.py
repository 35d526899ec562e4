"""Blocks in Mooncake: the only module that loads it.

Owns this host's segment and, where it has the part, the master. A block is one object: its frames as a peer
would send them, so key, length, layout and a checksum of each layer travel with it. Never waits for Mooncake
longer than a deadline: a call that does not come back is left to its thread, and is a miss. Invariant: what
get() gives has been parsed, and all its checksums hold.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from kvstored.cluster.frames import BLOCK_HEAD, WHOLE, Broken, Frame, parse

GET_S, PUT_S, START_S = 1.0, 5.0, 20.0
THREADS = 8  # of calls; those that hang are among them
MAGIC = b"KVF1"


class Unusable(Exception):
    """Mooncake cannot be used; the text says why."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_master(address: str, port: int, log: Any) -> subprocess.Popen[bytes]:
    import mooncake

    program = Path(mooncake.__file__).parent / "mooncake_master"
    words = [f"--rpc_address={address}", f"--rpc_port={port}", "--metrics_host=127.0.0.1", "--metrics_port=0"]
    words += ["--client_ttl=3", "--minloglevel=2"]
    return subprocess.Popen(
        [str(program), *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
    )


class Pool:
    def __init__(self, address: str, master: str, segment_bytes: int, replicas: int) -> None:
        """Raises Unusable."""
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise Unusable(f"mooncake cannot be loaded: {error}; pip install 'kvstored[cluster]'") from None
        self._calls = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="mooncake")
        self._config = ReplicateConfig()
        self._config.replica_num = replicas
        self._store = MooncakeDistributedStore()
        end = time.monotonic() + START_S
        while True:
            code = self._store.setup(address, "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
            if code == 0:
                break
            if time.monotonic() > end:
                raise Unusable(f"the pool's master at {master} is not to be had: setup answered {code}")
            time.sleep(0.2)
        names = ("puts", "put_bytes", "put_failed", "hits", "misses", "late", "corrupt")
        self.counts = dict.fromkeys(names, 0)

    def _within(self, seconds: float, call: Any, *arguments: Any) -> Any:
        """What the call says, None if it is late."""
        future = self._calls.submit(call, *arguments)
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            future.cancel()
            self.counts["late"] += 1
            return None

    def put(self, space: str, key: bytes, block: list[Frame]) -> bool:
        data = MAGIC + b"".join(frame.encoded() for frame in block)
        done = self._within(PUT_S, self._store.put, f"{space}/{key.hex()}", data, self._config) == 0
        self.counts["puts" if done else "put_failed"] += 1
        self.counts["put_bytes"] += len(data) if done else 0
        return done

    def get(self, space: str, key: bytes) -> list[Frame] | None:
        """A block's frames. None: nobody has it, or not in time, or what came is not that block."""
        name = f"{space}/{key.hex()}"
        if self._within(GET_S, self._store.is_exist, name) != 1:
            self.counts["misses"] += 1
            return None
        data = self._within(GET_S, self._store.get, name)
        if not data:
            self.counts["misses"] += 1
            return None
        try:
            if not data.startswith(MAGIC):
                raise Broken("no block")
            found = list(parse(data[len(MAGIC) :]))
            heads = [frame.payload[:32] for frame in found if frame.kind == BLOCK_HEAD]
            if heads != [key] or found[-1].kind != WHOLE:
                raise Broken("another block")
        except Broken:
            self.counts["corrupt"] += 1
            return None
        self.counts["hits"] += 1
        return found

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
