"""Mooncake's transfer engine and NIXL, as `bench.hosts` holds a fetch against them: a process that has
memory, and reads out of it into memory of this one, over TCP.

    python -m bench.hosts.contenders mooncake|nixl ADDRESS     serves, by Contender

Both as their own documents have it: memory is registered once, a read is one call, nothing is checked of what
passes. NIXL over UCX without a progress thread, both ends polling: with the default one it is many times
slower on two cores. Owns their processes. Neither is installed with kvstored: `.ci/cluster` unpacks Mooncake,
and `pip install --no-deps --target build/peers/python nixl-cu12==1.5.1` NIXL.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MOST = 80 << 20  # a block of 64 MiB, with what stands behind its layers
SMALL = 4096
BUILD = Path(__file__).resolve().parents[2] / "build"
PLACES = {"mooncake": BUILD / "cluster/python", "nixl": BUILD / "peers/python"}
SYSTEM = [BUILD / "cluster/system" / part / "x86_64-linux-gnu" for part in ("usr/lib", "lib")]
UCX = {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}


def environment() -> dict[str, str]:
    """In which both can be loaded: libraries are looked for when a process starts."""
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, SYSTEM)), **UCX}


def buffer() -> tuple[mmap.mmap, int]:
    import ctypes

    memory = mmap.mmap(-1, MOST)
    memory[:] = b"\x5a" * MOST
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def load(name: str) -> None:
    sys.path.insert(0, str(PLACES[name]))


def mooncake_engine(host: str) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("Mooncake does not start")
    return engine


def nixl_agent(name: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def serve(name: str, host: str) -> None:
    load(name)
    memory, address = buffer()
    if name == "mooncake":
        engine = mooncake_engine(host)
        engine.register_memory(address, MOST)
        print(json.dumps({"at": f"{host}:{engine.get_rpc_port()}", "address": address}), flush=True)
        sys.stdin.read()
        return
    agent = nixl_agent("target")
    agent.register_memory([(address, MOST, 0, "")], "DRAM")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": address}), flush=True)
    os.set_blocking(0, False)
    while sys.stdin.buffer.read(1) is None:  # until it is closed
        for _ in range(1000):
            agent.get_new_notifs()
    del memory


class Contender:
    """Raises SystemExit where it cannot be had; the text says why."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        if not PLACES[name].exists():
            raise SystemExit(f"{name} is not here; see bench/hosts/contenders.py")
        self._name = name
        self._server = subprocess.Popen(
            [sys.executable, "-m", "bench.hosts.contenders", name, host],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip
        assert self._server.stdout
        line = b""
        while not line.startswith(b"{"):  # Mooncake's log comes the same way
            if not (line := self._server.stdout.readline()):
                raise SystemExit(f"{name} does not start")
        said = json.loads(line)
        self._there, self.pid = said["address"], self._server.pid
        load(name)
        self._memory, self._here = buffer()
        if name == "mooncake":
            self._engine, self._at = mooncake_engine(host), said["at"]
            self._engine.register_memory(self._here, MOST)
        else:
            self._engine = nixl_agent("reader")
            self._engine.register_memory([(self._here, MOST, 0, "")], "DRAM")
            self._at = self._engine.add_remote_agent(base64.b64decode(said["metadata"]))

    def fetch(self, parts: int, length: int) -> None:
        """So many parts of so many bytes, in one batch. Raises SystemExit if it fails."""
        offsets = range(0, parts * length, length)
        if self._name == "mooncake":
            here, there = ([base + at for at in offsets] for base in (self._here, self._there))
            call, lengths = self._engine.batch_transfer_sync_read, [length] * parts
            if call(self._at, here, there, lengths):
                raise SystemExit("Mooncake's read failed")
            return
        agent = self._engine
        here, there = (
            agent.get_xfer_descs([(base + at, length, 0) for at in offsets], "DRAM")
            for base in (self._here, self._there)
        )
        handle = agent.initialize_xfer("READ", here, there, self._at)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit(f"NIXL's read ended with {state}")

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


if __name__ == "__main__":
    serve(*sys.argv[1:])
