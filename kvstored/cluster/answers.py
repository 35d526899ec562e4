"""What the daemon asks its fabric for: blocks of the pool, large ones straight to their place in its memory.

    daemon                                  fabric
    Fetch  ───────────────────────────────▶  (Over), Layout, Head
    (creates the block, lends its memory)    ◀── Offer
    Room   ───────────────────────────────▶  maps the extent, one transfer, unmaps it
    (verifies, publishes)                    ◀── Placed
    Checked ──────────────────────────────▶

Owns the listener on loopback, and which loans are over. Invariants: a daemon is told that a loan is over, or
that a block is placed, only when nothing of this process writes there any more; what comes as frames has been
verified.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping

from kvstored.cluster import frames
from kvstored.cluster.frames import Broken, Frame, Stream
from kvstored.cluster.mooncake import Extent, Place
from kvstored.cluster.pool import THREADS, Pool
from kvstored.cluster.stored import Described

MOST_STREAMS = 64
MOST_STRANGERS = 16  # who have not proven anything yet: the oldest makes room for the next
ACCEPT_PAUSE_S = 0.05
MOST_TOLD = 1024  # numbers of loans in a frame
ROOM = struct.Struct("<QQQ")


class Answers:
    def __init__(
        self, pool: Pool, node: str, daemon: str, salts: Mapping[str, bytes],
        memory: Mapping[str, tuple[int, int]], port: int,
    ) -> None:  # fmt: skip
        """`memory`: by namespace the descriptor of the daemon's pool, and its bytes. OSError if the port is
        not to be had."""
        self._pool, self._node, self._daemon = pool, node, daemon
        self._salts, self._memory = salts, memory
        self._over: dict[str, list[int]] = {space: [] for space in salts}  # loans, until they are told of
        self._lock = threading.Lock()  # guards it, and who is a stranger yet
        self._strangers: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=16)

    def serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:  # no descriptor is to be had
                time.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                if threading.active_count() > MOST_STREAMS + THREADS:  # Mooncake's calls have some too
                    raise RuntimeError("too many streams")
                threading.Thread(target=self._answer, args=(plain,), daemon=True).start()
            except RuntimeError:
                plain.close()

    def _answer(self, plain: socket.socket) -> None:
        stream = Stream(plain)
        space, told = "", list[int]()
        try:
            space = self._admit(plain, stream)
            while True:
                asked = stream.take(None)
                if asked.kind not in (frames.PING, frames.FETCH):
                    raise Broken("a frame that does not belong here")
                told = []  # who asks again has read what it was told
                told = self._tell_over(stream, space, asked.request)
                if asked.kind == frames.PING:
                    stream.send(frames.frame(frames.PONG, b"", asked.request))
                else:
                    self._give(stream, space, asked)
        except Broken:
            pass
        finally:
            stream.close()
            if told:  # perhaps nobody read it; to be told twice does no harm
                with self._lock:
                    self._over[space] += told

    def _admit(self, plain: socket.socket, stream: Stream) -> str:
        """The namespace that it wants. Raises Broken for who is not our daemon, or says nothing."""
        with self._lock:
            self._strangers.append(plain)
            if len(self._strangers) > MOST_STRANGERS:
                try:  # its thread closes it, when it runs: of a burst each arrival shuts another
                    self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
                except OSError:  # it has hung up
                    pass
        try:
            return frames.admit(stream, self._node, self._salts, self._daemon)
        finally:
            with self._lock:
                if plain in self._strangers:
                    self._strangers.remove(plain)

    def _tell_over(self, stream: Stream, space: str, request: int) -> list[int]:
        """What it has told; nothing of it is kept."""
        with self._lock:
            told = self._over[space][:MOST_TOLD]
            del self._over[space][:MOST_TOLD]
        if told:
            try:
                stream.send(frames.frame(frames.OVER, struct.pack(f"<{len(told)}Q", *told), request))
            except Broken:
                with self._lock:
                    self._over[space] += told
                raise
        return told

    def _give(self, stream: Stream, space: str, asked: Frame) -> None:
        count = len(asked.payload) // frames.KEY_BYTES
        keys = [asked.payload[i * 32 : i * 32 + 32] for i in range(min(count, frames.MOST_KEYS))]
        for item, key in enumerate(keys):
            Giving(self, self._pool, stream, space, item, asked.request).give(key)

    def extent(self, space: str, offset: int, length: int) -> Extent:
        """Raises Broken for one that is not in the pool."""
        fd, pool_bytes = self._memory[space]
        if offset + length > pool_bytes:
            raise Broken("room that the pool does not have")
        return Extent(fd, offset, length)

    def loan_is_over(self, space: str, loan: int) -> None:
        with self._lock:
            self._over[space].append(loan)


class Giving:
    """One key of one answer."""

    def __init__(
        self, answers: Answers, pool: Pool, stream: Stream, space: str, item: int, request: int
    ) -> None:
        self._answers, self._pool, self._stream = answers, pool, stream
        self._space, self._item, self._request = space, item, request

    def _say(self, *said: Frame) -> None:
        self._stream.send(*(frame.encoded(self._item, self._request) for frame in said))

    def _say_kind(self, kind: int) -> None:
        self._say(Frame(kind, 0, 0, 0, b""))

    def _alive(self) -> None:
        self._say_kind(frames.WAITING)

    def _heard(self, kind: int) -> Frame:
        frame = self._stream.take()
        if (frame.kind, frame.item, frame.request) != (kind, self._item, self._request):
            raise Broken("a frame that does not belong here")
        return frame

    def give(self, key: bytes) -> None:
        counts = self._pool.counts
        places = self._pool.find(self._space, key)
        found = self._pool.describe(places, key, self._alive)
        if found is None:
            counts["misses"] += 1
            self._say_kind(frames.MISSING)
            return
        known, rest = found
        found_it: bool | None = True
        if rest:
            self._say(known.layout, known.head, *rest)
        else:
            self._say(known.layout, known.head, known.sums)
            found_it = self._bring(places, known)
        counts["hits"] += found_it is True
        counts["misses"] += found_it is False
        counts["hit_bytes"] += known.extent_bytes if found_it else 0

    def _bring(self, places: list[Place], known: Described) -> bool | None:
        """None: the daemon does not want it any more."""
        room = self._heard(frames.ROOM).payload
        offset, length, loan = ROOM.unpack(room) if len(room) == ROOM.size else (0, 1, 0)
        if not length:
            return None
        if length != known.extent_bytes:
            raise Broken("room for another block")
        got: list[Frame] | bool | None = None
        if loan:
            extent = self._answers.extent(self._space, offset, length)
            got = self._pool.bring(
                places, known, extent, self._alive, lambda: self._answers.loan_is_over(self._space, loan)
            )
            if got is True:
                try:
                    self._say_kind(frames.PLACED)
                    good = self._heard(frames.CHECKED).layer
                except Broken:  # the daemon gave up, and does not know that nothing writes there
                    self._answers.loan_is_over(self._space, loan)
                    raise
                if good:
                    self._pool.counts["straight"] += 1
                    return True
        if not isinstance(got, list):  # no memory was lent, or what came is not the block
            got = self._pool.whole(places, known, self._alive) if not loan or got is True else None
        if got is None:
            self._say_kind(frames.LOST)
            return False
        self._say(*got)
        return True
