"""What the daemon has, put into the pool: blocks that were asked for again since they were sealed.

Owns the streams to the daemon, and what is remembered as put. Bounded: so many blocks a round. Invariant:
nothing is put that the daemon did not seal.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping

import grpc

from kvstored.cluster import frames
from kvstored.cluster.frames import Broken, Frame, Stream
from kvstored.cluster.pool import Pool
from kvstored.process.runtime_dir import grpc_address
from kvstored.v1 import admin_pb2, admin_pb2_grpc

CONNECT_S = 1.0
MOST_A_STEP = 64  # blocks that are put
USEFUL = 1.2  # uses, of which sealing is one: who was asked for again
MOST_KNOWN = 1 << 17  # keys that are remembered as put


class Putter:
    def __init__(
        self, pool: Pool, directory: str, daemon: tuple[str, str], node: str, salts: Mapping[str, bytes]
    ) -> None:
        """`directory`: the daemon's. `daemon`: its name, and where its fabric reads. `node`: this one's."""
        self._pool, self._directory, self._node, self._salts = pool, directory, node, salts
        self._daemon, self._listen = daemon
        self._known: dict[tuple[str, bytes], None] = {}  # put, or there, in order
        self._later: set[tuple[str, bytes]] = set()  # could not be put: the next time that a round has room
        self._layouts: dict[bytes, Frame] = {}
        self._streams: dict[str, Stream] = {}
        self._requests = 0

    @property
    def known(self) -> int:
        return len(self._known)

    def round(self) -> int:
        """Puts blocks that were asked for again since they were sealed, and that the pool was not given yet;
        how many. Raises grpc.RpcError, Broken."""
        put, full = 0, False
        with grpc.insecure_channel(grpc_address(os.path.join(self._directory, "grpc.sock"))) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            for space in self._salts:
                token = ""
                fresh: list[bytes] = []
                while len(fresh) < MOST_A_STEP:
                    asked = admin_pb2.ListRequest(
                        namespace=space, page_token=token, limit=1000, min_uses=USEFUL
                    )
                    page = admin.List(asked, timeout=5.0)
                    others = (block.key for block in page.blocks if (space, block.key) not in self._known)
                    fresh += [key for key in others if (space, key) not in self._later]
                    if not (token := page.next_page_token):
                        break
                now = fresh[:MOST_A_STEP]
                full = full or len(now) == MOST_A_STEP
                failed = self._put(space, [key for key in now if self._pool.wants(space, key)])
                self._later.update((space, key) for key in failed)
                for key in (key for key in now if key not in failed):
                    self._known[space, key] = None
                    put += 1
        if not full or len(self._later) > MOST_KNOWN:
            self._later.clear()
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return put

    def _put(self, space: str, keys: list[bytes]) -> set[bytes]:
        """Those that the daemon did not give now, or no host took: they are tried again."""
        if not keys:
            return set()
        stream = self._stream(space)
        self._requests += 1
        found = frames.fetch(stream, keys, self._requests)
        failed = set(keys) - found.keys()
        for key, block in found.items():
            for frame in block:
                if frame.kind == frames.LAYOUT:
                    self._layouts[hashlib.sha256(frame.payload).digest()] = frame
            head = next(frame for frame in block if frame.kind == frames.BLOCK_HEAD)
            layout = self._layouts.get(head.payload[32:64])
            if layout is None:
                raise Broken("a layout that was never told")
            whole = [layout, *(frame for frame in block if frame.kind != frames.LAYOUT)]
            if not self._pool.put(space, key, whole):
                failed.add(key)
        return failed

    def _stream(self, space: str) -> Stream:
        if space not in self._streams:
            host, _, port = self._listen.rpartition(":")
            try:
                stream = Stream(socket.create_connection((host, int(port)), timeout=CONNECT_S))
            except OSError as error:
                raise Broken(str(error)) from None
            frames.introduce(stream, self._node, space, self._salts[space], self._daemon)
            self._streams[space] = stream
        return self._streams[space]

    def begin_again(self) -> None:
        """With new streams: one of them broke."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
