"""The fabric's process, started and watched by the daemon.

Owns the process, the pipe that carries the salts, which stand in no argument and no environment, and the
lock that says whether one lives. Never waits for it while the daemon serves. Invariants: while the daemon
runs a fabric that ended is started again, at most every LEAST_S, later the more often it ended; the pipe ends
with the daemon, and the fabric with it; what a fabric was lent of the pool is nobody else's until it has
ended, and no daemon adopts a pool while an earlier one's fabric lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from kvstored import log
from kvstored.cluster.transport import RDMA
from kvstored.config.config import Config
from kvstored.errors import StartupError, StoreError
from kvstored.tiers.peers import Peers, address_towards
from kvstored.tiers.pools import Pool

LEAST_S, MOST_S, STEADY_S, STOP_S = 1.0, 30.0, 60.0, 5.0
LEFT_S, LEFT_LOOK_S = 10.0, 0.01
SILENT_S = 60.0  # after which what it told is old
STATUS = "fabric.json"  # in the runtime directory: what the fabric tells of the pool
MOST_LINE = 1 << 20
MASTER_PORT = 7401  # where `listen` names no port to count from


class Left:
    """The fabrics of this runtime directory, one at most: the lock that each inherits, held while it
    lives."""

    def __init__(self, directory: str, wanted: bool) -> None:
        """Waits until that of an earlier daemon has ended, which was killed with it: it might still write
        into the pool. `wanted`: whether this daemon will have one. Raises StartupError."""
        path = os.path.join(directory, "fabric.lock")
        self.fd = -1
        try:
            make = os.O_CREAT if wanted else 0
            self.fd = os.open(path, os.O_RDWR | make | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return  # there never was one
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}") from error
        end = time.monotonic() + LEFT_S
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() > end:
                    os.close(self.fd)
                    why = f"{path}: the fabric of an earlier daemon has not ended in {LEFT_S:.0f} s"
                    raise StartupError(f"{why}, and could write into the pool: {error.strerror}") from error
            time.sleep(LEFT_LOOK_S)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def told_of_the_pool(config: Config) -> dict[str, Any]:
    """master, transport, members, etcd_away and counters, as the fabric told them last; {} if it has not."""
    try:
        with open(os.path.join(config.dir, STATUS), "rb") as file:
            said = json.load(file)
        return {name: said[name] for name in ("master", "transport", "members", "etcd_away", "counters")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Sidecar:
    def __init__(self, config: Config, peers: Peers, pools: Mapping[str, Pool], left: Left) -> None:
        """After `peers` has started: its port is known then. `pools`: by namespace."""
        self._config, self._peers, self._pools = config, peers, pools
        self._inherited = [left.fd, *(pools[name].pool_fd for name in config.shared)]
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._thread = threading.Thread(target=self._watch, name="fabric", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _what_it_is_told(self) -> dict[str, Any]:
        """As it is now: `address` is "" while this host has none on the way to etcd."""
        config, peers = self._config, self._peers
        towards = address_towards(config.etcd)
        listen = peers.told(towards)
        at = listen.partition(":")[0]
        address = at if at and not at.startswith("127.") else towards
        port = config.listen.port if config.listen else 0
        name = config.cluster.removeprefix("etcd://").partition("/")[2] or "default"
        return {
            "dir": config.dir, "node": config.node, "listen": listen, "inner": peers.inner,
            "port": peers.pool_port, "etcd": config.etcd, "cluster": name, "address": address,
            "master_port": port + 1 if port else MASTER_PORT, "memory": config.cluster_memory,
            "replicas": config.cluster_replicas,
            "salts": {space: peers.salts[space].hex() for space in config.shared},
            "pools": {
                space: (pool.pool_fd, pool.geometry.capacity_bytes)
                for space, pool in self._pools.items()
                if space in config.shared
            },
        }  # fmt: skip

    def figures(self) -> dict[str, float]:
        """What the fabric told last, and how it is."""
        told = told_of_the_pool(self._config)
        try:
            age_s = time.time() - os.stat(os.path.join(self._config.dir, STATUS)).st_mtime
        except OSError:
            age_s = SILENT_S
        up = age_s < SILENT_S and bool(told) and self._process is not None and self._process.poll() is None
        lent = sum(peer["lent"] for _, peer in self._peers.stats())
        return {
            **told.get("counters", {}), "up": int(up), "etcd_up": int(up and not told["etcd_away"]),
            "members": len(told.get("members", ())), "restarts": self.restarts, "lent": lent,
            "rdma": int(up and told["transport"] == RDMA),
        }  # fmt: skip

    def _watch(self) -> None:
        pause_s, waits = LEAST_S, False  # for a way to etcd
        while not self._over.is_set():
            began = time.monotonic()
            said = self._what_it_is_told()
            if not said["address"]:  # what others were told of it would be true here alone
                if not waits:
                    log.warning("fabric_not_started", why=f"no way to {self._config.etcd}")
                waits = True
                self._over.wait(pause_s)
                pause_s = min(2 * pause_s, MOST_S)
                continue
            if waits:
                waits, pause_s = False, LEAST_S
                log.info("fabric_starts", address=said["address"])
            try:
                hears, tells = os.pipe()
            except OSError as error:
                log.warning("fabric_not_started", why=error.strerror, again_in_s=pause_s)
                self._over.wait(pause_s)
                continue
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "kvstored.cluster.fabric"],  # nothing of the directory here
                    stdin=subprocess.PIPE,
                    pass_fds=[*self._inherited, tells],
                )
            except OSError as error:  # no process is to be had now
                os.close(hears)
                log.warning("fabric_not_started", why=error.strerror, again_in_s=pause_s)
                self._over.wait(pause_s)
                continue
            finally:
                os.close(tells)
            self._process = process
            assert process.stdin
            if self._over.is_set():  # close() may have seen none yet
                process.stdin.close()
            try:
                process.stdin.write(json.dumps(said | {"tells": tells}).encode() + b"\n")
                process.stdin.flush()
            except (OSError, ValueError):  # it ended at once, or is to end: wait() says so
                pass
            with open(hears, "rb") as lines:
                self._hear(lines)
            status = process.wait()
            self._peers.placer_ended()
            if self._over.is_set():
                return
            pause_s = LEAST_S if time.monotonic() - began > STEADY_S else min(2 * pause_s, MOST_S)
            self.restarts += 1
            log.warning("fabric_ended", status=status, again_in_s=pause_s)
            self._over.wait(pause_s)

    def _hear(self, lines: BinaryIO) -> None:
        """Where the cluster's hosts listen, whenever that changes; until the fabric ends."""
        for line in iter(lambda: lines.readline(MOST_LINE), b""):
            try:
                told = json.loads(line)
            except ValueError:
                continue  # cut off by its end
            if isinstance(told, dict) and not self._over.is_set():  # a piece of a line may be a number
                try:
                    self._peers.members_are({str(name): str(at) for name, at in told.items()})
                except (StoreError, RuntimeError, OSError) as error:  # no thread for one: with the next word
                    log.warning("members_failed", why=f"{error!r:.200}")

    def close(self) -> None:
        self._over.set()
        process = self._process
        if process is None or process.stdin is None:
            if self._thread.is_alive():
                self._thread.join(STOP_S)
            return
        try:
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        self._thread.join(STOP_S)
