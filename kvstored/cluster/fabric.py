"""kvstored-fabric: a peer of the daemon beside it that has what the whole cluster's memory holds.

    python -m kvstored.cluster.fabric      # by the daemon (sidecar), which writes the rest to standard input

Owns the listener on loopback that the daemon fetches from, the loop that puts the daemon's blocks into the
pool, and the host's place in the cluster. Ends with standard input, that is with the daemon. Invariant:
nothing is put that the daemon did not seal, and nothing handed over that is not whole.
"""

from __future__ import annotations

import hashlib
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
from kvstored.cluster import frames
from kvstored.cluster.frames import Broken, Frame, Stream
from kvstored.cluster.membership import Away, Membership
from kvstored.cluster.mooncake import Mooncake, Unusable, start_master
from kvstored.cluster.pool import Pool
from kvstored.cluster.sidecar import STATUS
from kvstored.process.runtime_dir import grpc_address, write_whole
from kvstored.v1 import admin_pb2, admin_pb2_grpc

NODE = "pool"  # what the daemon calls this peer
STEP_S, MOST_STEP_S = 1.0, 8.0  # between two looks at what is there; longer the longer there was nothing
LOOK_S = 4.0  # between two looks at who is there
MOST_A_STEP = 64  # blocks that are put
USEFUL = 1.2  # uses, of which sealing is one: who was asked for again
MOST_KNOWN = 1 << 17  # keys that are remembered as put
MOST_STREAMS = 64


class Fabric:
    def __init__(self, said: dict[str, Any]) -> None:
        """`said`: dir, node, listen (of the daemon), port (of ours), etcd, cluster, address, memory, replicas
        and salts by namespace."""
        self._said = said
        self._salts = {name: bytes.fromhex(salt) for name, salt in said["salts"].items()}
        self._known: dict[tuple[str, bytes], None] = {}  # put, or there, in order
        self._layouts: dict[bytes, Frame] = {}
        self._streams: dict[str, Stream] = {}
        self._requests = 0
        about = {"listen": said["listen"], "address": said["address"], "memory": said["memory"]}
        self.members = Membership(said["etcd"], said["cluster"], said["node"], about)
        self._own_master = f"{said['address']}:{said['master_port']}"
        self._master_process: Any = None
        self._master = ""
        self.pool = self._join()
        self._listener = socket.create_server(("127.0.0.1", said["port"]), backlog=16)

    def _join(self) -> Pool:
        """Raises Unusable."""
        if not self.members.look():
            raise Unusable(f"etcd: {self.members.away}")
        master = self._own_master
        try:
            self._master = self.members.master(master)
        except Away as error:
            raise Unusable(f"etcd: {error}") from None
        if self._master == master:
            self._master_process = start_master(self._said["address"], self._said["master_port"], sys.stderr)
        mooncake = Mooncake(self._said["address"], self._master, self._said["memory"])
        try:
            self.members.tell(segment=mooncake.segment, endpoint=mooncake.endpoint)
        except Away:
            pass  # with the next lease

        def hosts() -> dict[str, str]:
            told = [about for about in self.members.members.values() if isinstance(about, dict)]
            known = {about["segment"]: about["endpoint"] for about in told if "segment" in about}
            return known | {mooncake.segment: mooncake.endpoint}

        return Pool(mooncake, self._said["replicas"], hosts)

    # ---- what the daemon asks for

    def serve(self) -> None:
        while True:
            plain, _ = self._listener.accept()
            if threading.active_count() > MOST_STREAMS:
                plain.close()
                continue
            threading.Thread(target=self._answer, args=(plain,), daemon=True).start()

    def _answer(self, plain: socket.socket) -> None:
        stream = Stream(plain)
        try:
            space = frames.admit(stream, NODE, self._salts, self._said["node"])
            while True:
                asked = stream.take(None)
                if asked.kind == frames.PING:
                    stream.send(frames.frame(frames.PONG, b"", asked.request))
                elif asked.kind == frames.FETCH:
                    self._give(stream, space, asked)
                else:
                    raise Broken("a frame that does not belong here")
        except Broken:
            pass
        finally:
            stream.close()

    def _give(self, stream: Stream, space: str, asked: Frame) -> None:
        count = len(asked.payload) // frames.KEY_BYTES
        keys = [asked.payload[i * 32 : i * 32 + 32] for i in range(min(count, frames.MOST_KEYS))]
        for item, key in enumerate(keys):
            found = self.pool.get(space, key)
            if found is None:
                found = [Frame(frames.MISSING, 0, 0, 0, b"")]
            stream.send(*(frame.encoded(item, asked.request) for frame in found))

    # ---- what the daemon has

    def put_round(self) -> int:
        """Puts blocks that were asked for again since they were sealed, and that the pool was not given yet;
        how many. Raises grpc.RpcError, Broken."""
        put = 0
        with grpc.insecure_channel(grpc_address(os.path.join(self._said["dir"], "grpc.sock"))) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            for space in self._salts:
                token, fresh = "", []
                while len(fresh) < MOST_A_STEP:
                    asked = admin_pb2.ListRequest(
                        namespace=space, page_token=token, limit=1000, min_uses=USEFUL
                    )
                    page = admin.List(asked, timeout=5.0)
                    fresh += [block.key for block in page.blocks if (space, block.key) not in self._known]
                    if not (token := page.next_page_token):
                        break
                now = fresh[:MOST_A_STEP]
                failed = self._put(space, [key for key in now if self.pool.wants(space, key)])
                for key in (key for key in now if key not in failed):
                    self._known[space, key] = None
                    put += 1
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return put

    def _put(self, space: str, keys: list[bytes]) -> set[bytes]:
        """Those that no host took: they are tried again."""
        if not keys:
            return set()
        failed = set()
        stream = self._stream(space)
        self._requests += 1
        for key, block in frames.fetch(stream, keys, self._requests).items():
            for frame in block:
                if frame.kind == frames.LAYOUT:
                    self._layouts[hashlib.sha256(frame.payload).digest()] = frame
            head = next(frame for frame in block if frame.kind == frames.BLOCK_HEAD)
            layout = self._layouts.get(head.payload[32:64])
            if layout is None:
                raise Broken("a layout that was never told")
            whole = [layout, *(frame for frame in block if frame.kind != frames.LAYOUT)]
            if not self.pool.put(space, key, whole):
                failed.add(key)
        return failed

    def _stream(self, space: str) -> Stream:
        if space not in self._streams:
            host, _, port = self._said["listen"].rpartition(":")
            try:
                stream = Stream(socket.create_connection((host, int(port)), timeout=STEP_S))
            except OSError as error:
                raise Broken(str(error)) from None
            frames.introduce(stream, NODE, space, self._salts[space], self._said["node"])
            self._streams[space] = stream
        return self._streams[space]

    def run(self) -> None:
        """Until standard input ends."""
        threading.Thread(target=self.serve, daemon=True).start()
        log.warning("fabric_listens_everywhere", why="Mooncake takes no address: only a firewall helps")
        log.info("fabric", master=self._master, members=len(self.members.members))
        pause_s, looked_s = STEP_S, 0.0
        while not select.select([sys.stdin], [], [], pause_s)[0]:
            if time.monotonic() - looked_s >= LOOK_S:
                looked_s = time.monotonic()
                self._look()
            if self._master_process is not None and self._master_process.poll() is not None:
                raise Unusable(f"mooncake_master ended with {self._master_process.returncode}")
            try:
                pause_s = STEP_S if self.put_round() else min(MOST_STEP_S, 1.5 * pause_s)
            except (Broken, grpc.RpcError) as error:
                for stream in self._streams.values():
                    stream.close()
                self._streams.clear()
                log.warning("fabric_put_failed", why=f"{error!r:.200}")
            self._tell()

    def _look(self) -> None:
        """Raises Unusable where the master is another than the one this pool was made with: another fabric
        joins it. Of a master whose host is gone the lease runs out, and who looks first takes the part."""
        if not self.members.look():
            return
        try:
            master = self.members.master(self._own_master)
        except Away:
            return
        if master and master != self._master:
            raise Unusable(f"the master was at {self._master} and is at {master}")

    def _tell(self) -> None:
        said = {
            "master": self._master, "members": sorted(self.members.members), "etcd_away": self.members.away,
            "transport": "tcp", "counters": {**self.pool.counts, "known": len(self._known)},
        }  # fmt: skip
        write_whole(os.path.join(self._said["dir"], STATUS), json.dumps(said).encode())

    def close(self) -> None:
        self.members.leave()
        if self._master_process is not None:
            self._master_process.terminate()
            self._master_process.wait()


def main() -> None:
    fabric, status = None, 0
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
