"""The fabric's process, started and watched by the daemon.

Owns the process and the pipe that carries the salts, which stand in no argument and no environment. Never
waits for it. Invariant: while the daemon runs a fabric that ended is started again, at most every LEAST_S,
later the more often it ended; the pipe ends with the daemon, and the fabric with the pipe.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from kvstored import log
from kvstored.config.config import Config
from kvstored.tiers.peers import Peers

LEAST_S, MOST_S, STEADY_S, STOP_S = 1.0, 30.0, 60.0, 5.0
STATUS = "fabric.json"  # in the runtime directory: what the fabric tells of the pool
MASTER_PORT = 7401  # where `listen` names no port to count from


def told_of_the_pool(config: Config) -> dict[str, Any]:
    """master, transport, members, etcd_away and counters, as the fabric told them last; {} if it has not."""
    try:
        with open(os.path.join(config.dir, STATUS), "rb") as file:
            said = json.load(file)
        return {name: said[name] for name in ("master", "transport", "members", "etcd_away", "counters")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def address_towards(etcd: str) -> str:
    """This host's address on the way to the first of these HOST:PORT; loopback if there is no way."""
    host, _, port = etcd.partition(",")[0].rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _what_it_is_told(config: Config, peers: Peers) -> dict[str, Any]:
    etcd, _, name = config.cluster.removeprefix("etcd://").partition("/")
    assert config.listen
    address = address_towards(etcd) if config.listen.on_loopback else config.listen.host
    master_port = config.listen.port + 1 if config.listen.port else MASTER_PORT
    return {
        "dir": config.dir, "node": config.node, "listen": peers.listening, "port": peers.pool_port,
        "etcd": etcd, "cluster": name or "default", "address": address,
        "master_port": master_port, "memory": config.cluster_memory, "replicas": config.cluster_replicas,
        "salts": {name: peers.salts[name].hex() for name in config.shared},
    }  # fmt: skip


class Sidecar:
    def __init__(self, config: Config, peers: Peers) -> None:
        """After `peers` has started: its port is known then."""
        self._line = json.dumps(_what_it_is_told(config, peers)).encode() + b"\n"
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._thread = threading.Thread(target=self._watch, name="fabric", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        pause_s = LEAST_S
        while not self._over.is_set():
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstored.cluster.fabric"], stdin=subprocess.PIPE, close_fds=True
            )
            self._process = process
            assert process.stdin
            try:
                process.stdin.write(self._line)
                process.stdin.flush()
            except OSError:  # it ended at once: wait() says so
                pass
            status = process.wait()
            if self._over.is_set():
                return
            pause_s = LEAST_S if time.monotonic() - began > STEADY_S else min(2 * pause_s, MOST_S)
            self.restarts += 1
            log.warning("fabric_ended", status=status, again_in_s=pause_s)
            self._over.wait(pause_s)

    def close(self) -> None:
        self._over.set()
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
