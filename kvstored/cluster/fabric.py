"""kvstored-fabric: a host's place in the cluster, and a peer of the daemon beside it that has what the whole
cluster's memory holds.

    python -m kvstored.cluster.fabric      # by the daemon (sidecar), which writes the rest to standard input

Owns the membership, the master where this host has the part, and the loop. What the daemon asks for is
answered by answers.py, what it has is put by putting.py. Ends with standard input, that is with the daemon,
and is killed where its daemon was. Invariant: of a host that may not be spoken to the daemon is told all the
same, and decides by itself.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any

import grpc

from kvstored import log
from kvstored.cluster.answers import Answers
from kvstored.cluster.frames import Broken
from kvstored.cluster.membership import Away, Membership
from kvstored.cluster.mooncake import Mooncake, Unusable, die_with_parent, start_master
from kvstored.cluster.pool import Pool
from kvstored.cluster.putting import Putter
from kvstored.cluster.sidecar import STATUS
from kvstored.cluster.transport import RDMA, TCP, choose
from kvstored.errors import StartupError
from kvstored.process.runtime_dir import write_whole

NODE = "pool"  # what the daemon calls this peer
STEP_S, MOST_STEP_S = 1.0, 8.0  # between two looks at what is there; longer the longer there was nothing
MEND_S = 2.0  # where blocks are on too few hosts
LOOK_S = 4.0  # between two looks at who is there
CONNECT_S = 1.0
REFUSED = 2  # looks at which the master's host says that there is none, until its part is free


class Fabric:
    def __init__(self, said: dict[str, Any]) -> None:
        """`said`: dir, node, listen (where others read; "" if they cannot), inner (where this process does),
        port (of ours), tells (a pipe), etcd, cluster, address, memory (0: no pool), replicas, and by
        namespace salts and pools (a descriptor that was inherited, and its bytes). Raises Unusable."""
        self._said = said
        about = {"listen": said["listen"], "address": said["address"], "memory": said["memory"]}
        about |= {"serves": self._own_master, "run": os.urandom(8).hex()}  # its master ends with this process
        self.members = Membership(said["etcd"], said["cluster"], said["node"], about)
        self._told: dict[str, str] = {}
        self._tells = os.fdopen(said["tells"], "wb", buffering=0)
        if not self.members.look():
            raise Unusable(f"etcd: {self.members.away}")
        self._tell_members()
        self._master, self._refused = "", 0
        self._runs: set[str] = set()  # of the fabrics that may have started that master
        self._master_process: Any = None
        self.pool: Pool | None = None
        self._transport = "none"
        if not said["memory"]:
            return
        self.pool = self._join()
        salts = {name: bytes.fromhex(salt) for name, salt in said["salts"].items()}
        memory = {space: (fd, pool_bytes) for space, (fd, pool_bytes) in said["pools"].items()}
        self._answers = Answers(self.pool, NODE, said["node"], salts, memory, said["port"])
        self._putter = Putter(self.pool, said["dir"], (said["node"], said["inner"]), NODE, salts)

    @property
    def _own_master(self) -> str:
        return f"{self._said['address']}:{self._said['master_port']}"

    def _join(self) -> Pool:
        """Raises Unusable."""
        master = self._own_master
        try:
            self._master = self.members.master(master)
            self.members.look()  # who has just taken the part says so
            self._runs = self._runs_now()
        except Away as error:
            raise Unusable(f"etcd: {error}") from None
        if self._master == master:
            self._master_process = start_master(self._said["address"], self._said["master_port"], sys.stderr)
        wanted = choose(self._transports().values())
        mooncake = Mooncake(self._said["address"], self._master, self._said["memory"], wanted)
        self._transport = mooncake.transport
        log.info("fabric_transport", transport=mooncake.transport, why=wanted.why or ",".join(wanted.devices))
        told = {"endpoint": mooncake.endpoint, "transport": mooncake.transport}
        try:
            self.members.tell(segment=mooncake.segment, **told)
        except Away:
            pass  # with the next look

        def hosts() -> dict[str, str]:
            told = self.members.members.values()
            both = [(about.get("segment"), about.get("endpoint")) for about in told]
            known = {at: to for at, to in both if isinstance(at, str) and isinstance(to, str)}
            return known | {mooncake.segment: mooncake.endpoint}

        return Pool(mooncake, self._said["replicas"], hosts)

    def run(self) -> None:
        """Until standard input ends. Raises Unusable."""
        if self.pool is not None:
            threading.Thread(target=self._answers.serve, daemon=True).start()
            log.warning("fabric_listens_everywhere", why="Mooncake takes no address: only a firewall helps")
        log.info("fabric", master=self._master, members=len(self.members.members))
        pause_s, looked_s = STEP_S, 0.0
        while not select.select([sys.stdin], [], [], pause_s)[0]:
            if time.monotonic() - looked_s >= LOOK_S:
                looked_s = time.monotonic()
                self._look()
            pause_s = min(LOOK_S, MOST_STEP_S) if self.pool is None else self._put(pause_s)
            self._tell()

    def _put(self, pause_s: float) -> float:
        """How long to wait until the next."""
        try:
            if self._putter.round():
                return STEP_S
            return min(MEND_S if self._putter.short else MOST_STEP_S, 1.5 * pause_s)
        except (Broken, grpc.RpcError) as error:
            self._putter.begin_again()
            log.warning("fabric_put_failed", why=f"{error!r:.200}")
            return pause_s

    def _look(self) -> None:
        """Who is there. Raises Unusable where the master is another than the one this pool was made with, or
        has ended: another fabric joins the next, and puts what its daemon has."""
        if self._master_process is not None and self._master_process.poll() is not None:
            raise Unusable(f"mooncake_master ended with {self._master_process.returncode}")
        if not self.members.look():
            return
        self._tell_members()
        if self.pool is None:
            return
        try:
            if self._master_is_gone():
                self.members.depose(self._master)
            master = self.members.master(self._own_master)
        except Away:
            return
        if master and master != self._master:
            raise Unusable(f"the master was at {self._master} and is at {master}")
        self._same_master()
        self._same_transport()

    def _transports(self) -> dict[str, str]:
        """What the cluster's other hosts that have a part of the pool use. One that says nothing is of a
        version that knew only TCP."""
        others = {node: about for node, about in self.members.members.items() if node != self._said["node"]}
        return {
            node: str(about.get("transport", TCP)) for node, about in others.items() if "segment" in about
        }

    def _same_transport(self) -> None:
        """Raises Unusable where a host without RDMA has joined a pool that goes over it."""
        for node, other in self._transports().items():
            if self._transport == RDMA != other:
                raise Unusable(f"{node} uses {other}, and this host {RDMA}: the pool goes over {TCP} anew")

    def _runs_now(self) -> set[str]:
        told = self.members.members.values()
        return {str(about.get("run")) for about in told if about.get("serves") == self._master} - {"None"}

    def _same_master(self) -> None:
        """Raises Unusable where the master's fabric was started anew: an empty one is at its address.
        Not where etcd has lost sight of it: the master may live."""
        now = self._runs_now()
        if self._runs and now and not now & self._runs:
            raise Unusable(f"the master at {self._master} was started anew")
        self._runs = self._runs or now

    def _master_is_gone(self) -> bool:
        """By the word of its host, twice. Of a host that says nothing the lease runs out."""
        host, _, port = self._master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except ConnectionRefusedError:
            self._refused += 1
        except (OSError, ValueError):  # nor where etcd holds no address
            pass
        else:
            self._refused = 0
        return self._refused >= REFUSED

    def _tell_members(self) -> None:
        found = {
            node: about["listen"]
            for node, about in self.members.members.items()
            if isinstance(about.get("listen"), str) and about["listen"]
        }
        if found != self._told:
            self._told = found
            self._tells.write(json.dumps(found).encode() + b"\n")

    def _tell(self) -> None:
        counts = {} if self.pool is None else self._counts(self.pool)
        said = {
            "master": self._master, "members": sorted(self.members.members), "etcd_away": self.members.away,
            "transport": self._transport, "counters": counts,
        }  # fmt: skip
        try:
            write_whole(os.path.join(self._said["dir"], STATUS), json.dumps(said).encode())
        except StartupError as error:  # a runtime directory that is full costs nobody the pool
            log.warning("fabric_cannot_tell", why=str(error))

    def _counts(self, pool: Pool) -> dict[str, int]:
        longest_ms = round(1000 * pool.longest_put_s)
        known, short = self._putter.known, self._putter.short
        return {**pool.counts, "known": known, "short": short, "longest_put_ms": longest_ms}

    def close(self) -> None:
        self.members.leave()
        if self._master_process is not None:
            self._master_process.terminate()
            self._master_process.wait()


def main() -> None:
    fabric, status = None, 0
    die_with_parent()
    try:
        fabric = Fabric(json.loads(sys.stdin.readline()))
        fabric.run()
    except Unusable as error:
        log.error("fabric_unusable", why=str(error))
        status = 1
    except Exception as error:  # whatever it was: the daemon starts another
        log.error("fabric_failed", why=f"{error!r:.200}")
        status = 1
    if fabric is not None:
        fabric.close()
    sys.stderr.flush()
    os._exit(status)  # Mooncake's threads, and calls that hang, hold up nothing


if __name__ == "__main__":
    main()
