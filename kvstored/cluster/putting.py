"""What the daemon has, put into the pool: blocks that were asked for again since they were sealed.

Owns the streams to the daemon, and what is remembered as put, and where. Bounded: so many blocks a round, so
long. Invariants: nothing is put that the daemon did not seal; a block of the daemon's that is known to lie on
fewer hosts than it should is put again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping

import grpc

from kvstored import log
from kvstored.cluster import frames
from kvstored.cluster.frames import Broken, Frame, Stream
from kvstored.cluster.pool import Pool
from kvstored.process.runtime_dir import grpc_address
from kvstored.v1 import admin_pb2, admin_pb2_grpc

CONNECT_S = 1.0
MOST_A_STEP = 64  # blocks that are put
MOST_A_FETCH = 8  # of those, in memory at a time
ROUND_S = 2.0  # for what is new, and for what is mended: the lease is kept between two rounds
USEFUL = 1.2  # uses, of which sealing is one: who was asked for again
POSTPONED_S = 60.0  # for a block that broke the stream
MOST_KNOWN = 1 << 17  # keys that are remembered as put


class Putter:
    def __init__(
        self, pool: Pool, directory: str, daemon: tuple[str, str], node: str, salts: Mapping[str, bytes],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`directory`: the daemon's. `daemon`: its name, and where its fabric reads. `node`: this one's."""
        self._pool, self._directory, self._node, self._salts = pool, directory, node, salts
        self._daemon, self._listen = daemon
        self._now = now
        self._known: dict[tuple[str, bytes], frozenset[str]] = {}  # the hosts that have it, in order
        self._short: dict[tuple[str, bytes], None] = {}  # of those, on too few; next first
        self._hosts: frozenset[str] = frozenset()  # for which that holds
        self._same: dict[frozenset[str], frozenset[str]] = {}  # many blocks lie on the same hosts
        self._later: set[tuple[str, bytes]] = set()  # could not be put: the next time that a round has room
        self._postponed: dict[tuple[str, bytes], float] = {}  # broke the stream; until when
        self._layouts: dict[bytes, Frame] = {}
        self._streams: dict[str, Stream] = {}
        self._requests = 0

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def short(self) -> int:
        """Blocks that were put, and lie on fewer hosts than they should."""
        return len(self._short)

    def round(self) -> int:
        """Puts again what is on too few hosts since one has gone or come, and then blocks that were asked for
        again since they were sealed, and that the pool was not given yet. How many of both are on more
        hosts than was known. Raises grpc.RpcError, Broken."""
        self._look_at_hosts()
        self._postponed = {block: until for block, until in self._postponed.items() if until > self._now()}
        put, full = self._mend(self._now() + ROUND_S), False
        end = self._now() + ROUND_S
        address = grpc_address(os.path.join(self._directory, "grpc.sock"))
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            for space in self._salts:
                fresh = self._fresh(admin, space)
                full = full or len(fresh) == MOST_A_STEP
                self._later.update((space, key) for key in fresh)  # also those that break the stream
                put += self._put(space, fresh, end)
                self._later.difference_update([(space, key) for key in fresh if (space, key) in self._known])
        if not full or len(self._later) > MOST_KNOWN:
            self._later.clear()
        while len(self._known) > MOST_KNOWN:
            block = next(iter(self._known))
            del self._known[block]
            self._short.pop(block, None)
        return put

    def _fresh(self, admin: admin_pb2_grpc.AdminStub, space: str) -> list[bytes]:
        token, fresh = "", list[bytes]()
        while len(fresh) < MOST_A_STEP:
            asked = admin_pb2.ListRequest(namespace=space, page_token=token, limit=1000, min_uses=USEFUL)
            page = admin.List(asked, timeout=5.0)
            others = (block.key for block in page.blocks if (space, block.key) not in self._known)
            fresh += [key for key in others if (space, key) not in self._later]
            if not (token := page.next_page_token):
                break
        return fresh[:MOST_A_STEP]

    # ---- who has it

    def _look_at_hosts(self) -> None:
        """A host that is gone has nothing any more, and one that came may lack what it should have."""
        if (hosts := self._pool.hosts()) == self._hosts:
            return
        self._hosts = hosts
        self._same.clear()
        for (space, key), there in self._known.items():
            self._note(space, key, there & hosts)

    def _note(self, space: str, key: bytes, there: frozenset[str]) -> bool:
        """Whether it is new, or on more hosts than was known."""
        before = self._known.get((space, key))
        self._known[space, key] = self._same.setdefault(there, there)
        self._short.pop((space, key), None)
        if len(there) < self._pool.wanted():
            self._short[space, key] = None
        return before is None or len(there) > len(before)

    def _mend(self, end: float) -> int:
        """Puts blocks that are on too few hosts, where another host would take them."""
        tried: dict[str, list[bytes]] = {}
        for space, key in list(itertools.islice(self._short, MOST_A_STEP)):
            self._note(space, key, self._known[space, key])  # behind the others
            if self._pool.has_room(self._known[space, key]):
                tried.setdefault(space, []).append(key)
        return sum(self._put(space, keys, end) for space, keys in tried.items())

    # ---- bringing it there

    def _put(self, space: str, keys: list[bytes], end: float) -> int:
        """How many are new in the pool, or on more hosts; not those that the daemon did not give, that no
        host took, or for which there was no time. What the daemon has no more is forgotten: if it lists it
        again, that is new."""
        noted = 0
        for at in range(0, len(keys), MOST_A_FETCH):
            wanting = []
            for key in keys[at : at + MOST_A_FETCH]:
                reached = self._pool.reached(space, key) if self._now() < end else None
                if reached is None:
                    return noted  # the master does not answer, or it is late
                if not reached.room:
                    noted += bool(reached.hosts) and self._note(space, key, reached.hosts)
                elif (space, key) not in self._postponed:
                    wanting.append(key)
            for key, block in self._given(space, wanting, end).items():
                if not block:
                    self._known.pop((space, key), None)
                    self._short.pop((space, key), None)
                elif self._now() < end and (there := self._pool.put(space, key, block)):
                    noted += self._note(space, key, there)
        return noted

    def _given(self, space: str, keys: list[bytes], end: float) -> dict[bytes, list[Frame]]:
        """Whole blocks; nothing for one that the daemon has not. Where they break the stream, one by one, as
        far as there is time: who breaks it alone is postponed. Raises Broken where there is no stream."""
        if not keys:
            return {}
        stream, blocks = self._stream(space), dict[bytes, list[Frame]]()
        try:
            return {key: list[Frame]() for key in keys} | self._fetched(stream, keys)
        except Broken:  # of one of them, or the stream is old
            self.begin_again()
        for key in keys:
            if self._now() >= end:
                break
            stream = self._stream(space)
            try:
                blocks[key] = self._fetched(stream, [key]).get(key, [])
            except Broken as error:
                self.begin_again()
                self._postponed[space, key] = self._now() + POSTPONED_S
                log.warning("fabric_block_postponed", namespace=space, why=f"{error!r:.200}")
        return blocks

    def _fetched(self, stream: Stream, keys: list[bytes]) -> dict[bytes, list[Frame]]:
        self._requests += 1
        found = frames.fetch(stream, keys, self._requests)
        whole = {}
        for key, block in found.items():
            for frame in block:
                if frame.kind == frames.LAYOUT:
                    self._layouts[hashlib.sha256(frame.payload).digest()] = frame
            head = next(frame for frame in block if frame.kind == frames.BLOCK_HEAD)
            layout = self._layouts.get(head.payload[32:64])
            if layout is None:
                raise Broken("a layout that was never told")
            whole[key] = [layout, *(frame for frame in block if frame.kind != frames.LAYOUT)]
        return whole

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
