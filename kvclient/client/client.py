"""KVClient: one attached session, kept attached, with the policy for when the store is unreachable.

Owns the native client and when it attaches anew; never looks at the bytes of a block. The calls that run for
every prompt (lookup, get) add one Python frame to the native call and nothing else. Invariant: a call either
answers, or raises an error of kvclient.errors within timeout_s and one attachment; what on_error="miss" turns
into misses is only that the store cannot be reached, and each time is counted (metrics()).
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS, MAX_LOAD_BYTES, Geometry, layout_blob
from kvclient.checks import check_bounds, whole_seconds
from kvclient.client.breaker import Breaker
from kvclient.errors import Closed, Detached, InvalidArgument, LayoutLost, Unavailable

if TYPE_CHECKING:
    from kvclient._core import Blocks, FoundBlock, Lookup, Writer
    from kvclient.client.region import Region

ATTACH_TRIES = 3  # each against another daemon: one that restarts faster than that is not serving anybody
LOOK_S = 0.005  # between looks for a daemon that has taken over the memory and does not listen yet

Answer = TypeVar("Answer")
_clients: weakref.WeakSet[KVClient] = weakref.WeakSet()


class KVClient:
    """A session with the store. Thread-safe. A forked child attaches anew at its first call."""

    def __init__(self, attach: Callable[[], Any], namespace: str, timeout_s: float = 5.0) -> None:
        self.namespace = namespace
        self._patience_s = timeout_s  # for a daemon that is starting
        self.reattached_total = 0
        self.suppressed_total = 0
        self._breaker = Breaker()
        self._attach = attach
        self._layouts: dict[int, bytes] = {}  # id told to the user -> blob
        # Of which attachment, and id told to the user -> id in its pool, where they differ. One pair: a
        # thread that has the ids of one attachment must not use them in the next.
        self._ids: tuple[int, dict[int, int]] = (0, {})  # no attachment is number 0
        self._closed = False
        self._native: Any = None
        self._lock = threading.RLock()
        self._first_attach()
        _clients.add(self)

    def _first_attach(self) -> None:
        self._bind(self._attach())

    def _bind(self, native: Any) -> None:
        self._native = native
        self._ids = (native.attachment, {})
        self._lookup, self._get = native.lookup, native.get

    # ---------------------------------------------------------------- the calls of every prompt
    # (No lambda over their arguments: each argument that one names costs every call a cell of 30 ns.)

    def lookup(self, keys: Any, peers: bool = False) -> Lookup:
        """How far the keys are present: .resident leading blocks in memory, how many right behind them are
        .pending (being written) or .on_disk, and .states, a byte per key (0 missing, 1 pending, 2 resident,
        3 on disk). It reads the block table and asks nobody: a block that lies on disk and has no record
        there, as all are in use, is missing here; get() with wait_s and prefetch() find it. With peers, what
        is missing and lies on another host is 4, and .on_peers counts it: one message to the daemon, if
        anything is missing and it has peers; it knows by what they told some milliseconds ago.
        `keys` here and below: a Chain, a list of 32-byte keys, or their bytes in one piece.
        """
        try:
            return self._lookup(keys, True) if peers else self._lookup(keys)
        except Detached:
            return self._again(methodcaller("lookup", keys, True) if peers else methodcaller("lookup", keys))

    def get(self, keys: Any, follow: bool = False, wait_s: float = 0.0, verify: bool = False) -> Blocks:
        """Pins the blocks: per key a BlockView or None. With follow also those still being written.

        With wait_s, what lies on disk is loaded, and what others write is waited for, so many seconds at
        most; with follow as well, a block is there from its first layer on. What other hosts have not sent by
        then is not brought any more, unless somebody else wants it. With verify, a block whose bytes do not
        match their checksums is a miss, and the daemon drops it if it finds the same. Beyond max_pins
        the item itself raises PinsExhausted when it is taken.
        """
        try:
            if wait_s or verify:
                return self._get(keys, follow, wait_s, verify)
            return self._get(keys, True) if follow else self._get(keys)
        except Detached:
            return self._again(methodcaller("get", keys, follow, wait_s, verify))

    def find(
        self, identity: bytes, token_ids: Any, block_tokens: int = DEFAULT_BLOCK_TOKENS, on_disk: bool = False
    ) -> list[FoundBlock]:
        """Sealed blocks anywhere in the tokens, by where they start. Candidates, as fingerprints say it:
        compare their tokens (kvclient.blocks.plan does). on_disk: also such as were evicted and lie there.
        """
        return self._call(lambda native: native.find(identity, token_ids, block_tokens, on_disk))

    def children(self, key: bytes, on_disk: bool = False) -> list[bytes]:
        """Keys of sealed blocks that may continue this one, a few at most."""
        return self._call(lambda native: native.children(key, on_disk))

    # ---------------------------------------------------------------- the rest

    def create(
        self,
        keys: Any,
        layout_id: int,
        priority: int = 35,
        ttl_s: float | None = None,
        token_counts: Sequence[int] | None = None,
        sealing: Any = None,
    ) -> Writer:
        """Claims the keys; the Writer's context seals what was granted, or aborts it on an exception.

        Keys are digests, 32 bytes each: of those that share bytes 4 to 7 no more than 448 find a place.

        priority is 0 to 100: of two blocks used alike the lower goes first, and ten more are worth as much
        as a use that is a half life newer (an hour, or a quarter of the pool put anew).
        ttl_s is how many seconds from now the blocks may live (rounded up to whole ones), None for ever.
        token_counts has the tokens of each block where they are fewer than the layout's. `sealing` is an
        earlier writer whose granted blocks are sealed in the same message. A key that gets no memory answers
        "no_space" and fails nothing else; with on_error="miss" all of them answer "unavailable" while there
        is no store.
        Raises InvalidArgument, NotPermitted, Unavailable, DeadlineExceeded.
        """
        seconds = whole_seconds(ttl_s)

        def ask(native: Any) -> Any:
            attachment, moved = self._ids
            here = moved.get(layout_id, layout_id)
            try:
                return native.create(keys, here, priority, seconds, token_counts, sealing, attachment)
            except LayoutLost:
                here = self._registered_again(native, layout_id)
                return native.create(keys, here, priority, seconds, token_counts, sealing, attachment)

        return self._call(ask)

    def delete(self, keys: Any) -> int:
        """Deletes sealed blocks and says how many were there. Their readers keep valid bytes."""
        return self._call(lambda native: native.delete(keys))

    def touch(self, keys: Any) -> int:
        """Counts a use of each block, for eviction, and says how many were there."""
        return self._call(lambda native: native.touch(keys))

    def prefetch(self, keys: Any, priority: int = 35, node: str = "") -> int:
        """Has blocks that lie on disk loaded, and what other hosts have brought, and waits for nothing. Says
        how many of the keys are in memory or on their way; loads of higher priority go first. `node`: the
        host that is known to have them. It is asked before others, though it told nothing of them yet; one
        that is no peer, or down, counts for nothing.
        Raises InvalidArgument for a priority or a name that there is not, Unavailable, DeadlineExceeded."""
        return self._call(lambda native: native.prefetch(keys, priority, node))

    def push(self, keys: Any, to: str) -> int:
        """Has another host told to come for these blocks, and waits for nothing: who asks for them there
        finds them, or their first layers. `to` is its node; its namespace takes them if it has
        share = "read-write". Blocks that are still written come layer by layer. Says how many of the keys it
        is told of: no more than 4,096 wait to be told. A hint: what a connection that breaks had not said is
        not said again, and comes when it is asked for there.
        Raises InvalidArgument, NotPermitted, DeadlineExceeded, and Unavailable if that host is not
        connected, or takes nothing."""
        return self._call(lambda native: native.push(keys, to))

    def load_estimate_s(self, length_bytes: int) -> float | None:
        """Seconds until so many bytes, asked for now, would be loaded from disk, by what the daemon's loads
        took so far. None: it has loaded nothing yet."""
        check_bounds("length_bytes", length_bytes, 0, MAX_LOAD_BYTES)
        seconds = self._call(lambda native: native.load_estimate_s(length_bytes))
        return None if seconds < 0 else seconds

    def peer_estimate_s(self, length_bytes: int) -> float | None:
        """As load_estimate_s, from another host. None: nothing came from one yet."""
        check_bounds("length_bytes", length_bytes, 0, MAX_LOAD_BYTES)
        seconds = self._call(lambda native: native.peer_estimate_s(length_bytes))
        return None if seconds < 0 else seconds

    def peers_up(self) -> int:
        """How many other hosts the daemon can ask now, a shared directory counted as one: get() with wait_s
        finds what lies there."""
        return self._call(lambda native: native.peers_up())

    def register_layout(self, layout: Any) -> int:
        """The id of a Layout, or of the bytes of one. The same layout has the same id. A namespace holds 512
        that have blocks in memory.
        Raises InvalidArgument, NoSpace, NotPermitted, Unavailable, DeadlineExceeded."""
        blob = layout_blob(layout)
        with self._lock:  # nobody attaches anew in between
            return self._remember(blob, self._call(lambda native: native.register_layout(blob)))

    def _remember(self, blob: bytes, layout_id: int) -> int:
        """The id to tell the user: the pool's, unless that was told for another layout of an earlier pool."""
        with self._lock:
            for told, known in self._layouts.items():
                if known == blob:
                    return told
            told = layout_id
            if layout_id in self._layouts:
                told = max(self._layouts) + 1
                self._ids[1][told] = layout_id
            self._layouts[told] = blob
            return told

    def _registered_again(self, native: Any, layout_id: int) -> int:
        """The pool's id now of a layout that had no block left, so that another was given its place."""
        with self._lock:
            if (blob := self._layouts.get(layout_id)) is None:
                raise LayoutLost(f"layout {layout_id} was registered by another client, and went")
            self._ids[1][layout_id] = here = native.register_layout(blob)
            return here

    def register_region(self, length: int) -> Region:
        """Memory of the pool in one piece for an allocator of the caller's own, writable here and nowhere
        else; blocks are published out of it by naming where their buffers lie (kvclient.client.region).
        Raises InvalidArgument, NoSpace, Unavailable, DeadlineExceeded."""
        from kvclient.client.region import Region  # not at import: it needs NumPy

        return Region(self, length)

    def _geometry(self, layout_id: int) -> Geometry:
        if (blob := self._layouts.get(layout_id)) is None:
            raise InvalidArgument(f"layout {layout_id} was not registered by this client")
        return Geometry.from_blob(blob)

    def stats(self) -> dict[str, Any]:
        """The namespace's figures, by name: used_bytes, capacity_bytes, faulted_bytes, blocks (sealed), pins,
        sessions, hits, misses, evictions and more, all integers. Of its disk tier, 0 without one: disk_files,
        disk_bytes, disk_quota_bytes, and disk_loaded and disk_written, blocks since the daemon began. And
        `node`, a text: this host's name among its peers, "" without any, or where the daemon is older."""
        return {"node": "", **json.loads(self._call(lambda native: native.stats()))}

    def give_to_device(self, writes: bool = True) -> bool:
        """Before a device (a GPU's or a network card's transfers) is given memory of the pool to write to;
        and with writes=False when it is done with all of it. In between nothing that this client leaves
        behind is reused before its process ends. False: the daemon is older, and waits for no device."""
        return self._call(lambda native: native.give_to_device(writes))

    def grpc_token(self) -> str:
        """What a gRPC call shows as `authorization: Bearer …` on guests.sock, the daemon's socket for other
        users. It stands for this session's namespace and mode, and ends with the session: ask again after
        attaching anew."""
        return self._call(lambda native: native.grpc_token())

    @property
    def salt(self) -> bytes | None:
        """What keeps this namespace's reuse identities apart from others': 32 bytes, b"" if the namespace
        has none, None while no daemon has said."""
        return self._native.salt if self._native is not None and not self._closed else None

    def close(self) -> None:
        """Ends the session: what is unsealed is aborted, views stay readable. Idempotent."""
        with self._lock:
            self._closed = True
            _clients.discard(self)
            if self._native is not None:
                self._native.close()

    @property
    def attached(self) -> bool:
        """Whether the session with the daemon stands at this moment."""
        return self._native is not None and not self._closed and self._native.attached

    @property
    def degraded(self) -> bool:
        """Whether the store counts as empty at the moment, because it could not be reached."""
        return self._breaker.open

    @property
    def why_degraded(self) -> str:
        """What reaching the store failed with last; "" while it is there."""
        return self._breaker.why if self._breaker.open else ""

    # Facts of the attachment, for diagnosis. (No __getattr__: it would slow down every attribute of the
    # class.)
    session = property(lambda self: self._native.session, doc="The session's number in its namespace.")
    epoch = property(lambda self: self._native.epoch, doc="Of the daemon attached to; it grows with each.")
    populated_bytes = property(
        lambda self: self._native.populated_bytes, doc="Bytes of the pool in this process's page tables."
    )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "attached" if self.attached else "not attached"
        return f"<{type(self).__name__} of namespace {self.namespace!r}, {state}>"

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------- staying attached

    def _call(self, ask: Callable[[Any], Answer]) -> Answer:
        try:
            return ask(self._native)
        except Detached:
            return self._again(ask)

    def _again(self, ask: Callable[[Any], Answer]) -> Answer:
        """Attaches anew and asks again. A daemon that has begun to take over the pool is waited for. Without
        one, memory that nobody has taken over answers what it can; else Unavailable is raised at once."""
        until = time.monotonic() + self._patience_s
        for _ in range(ATTACH_TRIES):
            gone: Exception | None = None
            try:
                gone = self._reattach_to_the_next(until)
                return ask(self._native)
            except Detached as error:
                if isinstance(gone, Unavailable):
                    raise gone from error
                last = error
        raise Unavailable(f"the session ended {ATTACH_TRIES} times in a row while asking: {last}") from last

    def _reattach_to_the_next(self, until: float) -> Exception | None:
        """Answers why it could not be, where the memory of before can still be read."""
        while True:
            try:
                self._reattach()
                return None
            except (Unavailable, Detached) as error:
                if self._native is None or self._closed:
                    raise
                if self._native.readable:
                    return error
                if not self._native.awaited or time.monotonic() >= until:
                    raise
            time.sleep(LOOK_S)

    def _reattach(self) -> None:
        with self._lock:
            if self._closed:
                raise Closed("the client was closed")
            if self._native is None or not self._native.attached:
                if self._native is None:
                    self._bind(self._attach())
                else:
                    self._native.reattach()
                self.reattached_total += 1
            elif self._ids[0] == self._native.attachment:
                return  # another thread was first
            attachment = self._native.attachment
            if self._ids[0] == attachment:
                return  # the session was resumed: it is the same pool
            # A daemon that started empty numbers layouts anew: none is used here before all are known.
            moved = {
                told: now
                for told, blob in self._layouts.items()
                if (now := self._native.register_layout(blob)) != told
            }
            self._ids = (attachment, moved)


def metrics() -> dict[str, int]:
    """This process's figures over its open clients, under the names an exporter would use."""
    clients = list(_clients)
    return {
        "kvclient_degraded": int(any(client.degraded for client in clients)),
        "kvclient_clients": len(clients),
        "kvclient_reattached_total": sum(client.reattached_total for client in clients),
        "kvclient_suppressed_errors_total": sum(client.suppressed_total for client in clients),
        "kvclient_breaker_opened_total": sum(client._breaker.opened_total for client in clients),
    }


def _renew_locks() -> None:
    # A fork may copy a lock while another thread holds it; the child has one thread, so new ones are right.
    for client in list(_clients):
        client._lock = threading.RLock()
        client._breaker.renew_lock()
        if client._native is not None:
            client._native.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
