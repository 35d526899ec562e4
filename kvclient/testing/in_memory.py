"""InMemoryClient: a public fake with the whole API of KVClient, for tests without a daemon.

    client = kvclient.InMemoryClient(capacity_bytes=64 << 20)
    other = client.another()            # a second session on the same memory, for another thread

Owns the client; its handles are in_memory_blocks' and in_memory_writer's, the rules in_memory_store's. Never
connects to anything. Invariant: every answer is one KVClient could give; the conformance suite
(kvclient.testing.conformance) runs the same cases through both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS, MAX_LOAD_BYTES, layout_blob
from kvclient.checks import MOST_NODE_BYTES, check_bounds, check_real, whole_seconds
from kvclient.errors import Closed, InvalidArgument, Unavailable
from kvclient.testing.in_memory_blocks import Blocks, BlockView, Lookup, split_keys
from kvclient.testing.in_memory_store import MISSING, PENDING, InMemoryStore, Pin, Session
from kvclient.testing.in_memory_writer import Writer

if TYPE_CHECKING:
    from kvclient._core import FoundBlock

MOST_SIGHTINGS = 8  # of blocks at one offset, and of one parent's children: the daemon's bound


class InMemoryClient:
    """A KVClient without a daemon, of capacity_bytes of this process's memory. Thread-safe.

    `another()` gives a second session on the same memory. It has no disk: nothing is ever loaded. Raises
    InvalidArgument; its calls raise what the KVClient's do.
    """

    def __init__(
        self,
        capacity_bytes: int = 256 << 20,
        *,
        max_blocks: int = 65_536,
        max_pins: int = 65_536,
        namespace: str = "default",
        timeout_s: float = 5.0,
        store: InMemoryStore | None = None,
    ) -> None:
        check_bounds("max_pins", max_pins, 1, 1 << 20)
        check_real("timeout_s", timeout_s, 0, 3600)
        self.store = store or InMemoryStore(capacity_bytes, max_blocks)
        self.namespace, self.timeout_s, self.max_pins = namespace, timeout_s, max_pins
        self.session = Session(max_pins)
        self._closed = threading.Event()
        self.store.sessions.add(self.session)

    attached = property(lambda self: not self._closed.is_set(), doc="Whether it was not closed.")
    degraded = False
    why_degraded = ""
    salt = b""  # of the namespace; a test may set another

    def another(self, max_pins: int | None = None) -> InMemoryClient:
        """A second session on the same memory, as another process would have."""
        return InMemoryClient(
            store=self.store,
            namespace=self.namespace,
            timeout_s=self.timeout_s,
            max_pins=max_pins or self.max_pins,
        )

    def register_layout(self, layout: Any) -> int:
        """The id of a Layout, or of the bytes of one. The same layout has the same id."""
        with self._locked():
            return self.store.register_layout(layout_blob(layout))

    def lookup(self, keys: Any, peers: bool = False) -> Lookup:
        """How far the keys are present: .resident leading blocks, .pending, .on_disk, .states. There is no
        other host."""
        with self._locked():
            return Lookup(bytes(self.store.state(key) for key in split_keys(keys)))

    def get(
        self, keys: Any, follow: bool = False, wait_s: float = 0.0, verify: bool = False
    ) -> Blocks:
        """Per key a BlockView or None. With wait_s, what others write is waited for; the fake has no disk."""
        names = split_keys(keys)
        deadline = time.monotonic() + wait_s
        with self._locked():
            while wait_s and not follow and any(self.store.state(key) == PENDING for key in names):
                if not self.store.changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            pins = [self.store.pin(key, self.session, follow) for key in names]
        blocks = [BlockView(self, pin) if isinstance(pin, Pin) else pin for pin in pins]
        if verify:
            for index, block in enumerate(blocks):
                if isinstance(block, BlockView) and block.sealed and not block.verify():
                    self.delete([block.key])
                    blocks[index] = "miss"
        return Blocks(self, blocks)

    def prefetch(self, keys: Any, priority: int = 35, node: str = "") -> int:
        """How many of the keys are in memory or being written: there is nothing below to load from, and no
        host of any name."""
        check_bounds("priority", priority, 0, 100)
        check_bounds("bytes of a host's name", len(node.encode()), 0, MOST_NODE_BYTES)
        return len(found := self.lookup(keys).states) - found.count(MISSING)

    def push(self, keys: Any, to: str) -> int:
        """Raises Unavailable: there is no other host."""
        raise Unavailable(f"no host {to} takes what is pushed to it: a store in this process has no others")

    def load_estimate_s(self, length_bytes: int) -> float | None:
        """None: nothing was ever loaded."""
        check_bounds("length_bytes", length_bytes, 0, MAX_LOAD_BYTES)
        return None

    def peer_estimate_s(self, length_bytes: int) -> float | None:
        """None: there is no other host."""
        check_bounds("length_bytes", length_bytes, 0, MAX_LOAD_BYTES)
        return None

    def peers_up(self) -> int:
        """0: there is no other host."""
        return 0

    def find(
        self, identity: bytes, token_ids: Any, block_tokens: int = DEFAULT_BLOCK_TOKENS, on_disk: bool = False
    ) -> list[FoundBlock]:
        """Sealed blocks anywhere in the tokens, by start; places of one do not overlap."""
        # Native arithmetic: one definition of a fingerprint.
        from kvclient._core import FoundBlock, window_fingerprints

        windows = window_fingerprints(identity, token_ids, block_tokens).tolist()
        with self._locked():
            known = self.store.by_fingerprint(block_tokens)
        found, ends = [], dict[bytes, int]()
        for start, window in enumerate(windows):
            for key in known.get(window, ())[:MOST_SIGHTINGS]:
                if start >= ends.get(key, 0):
                    ends[key] = start + block_tokens
                    found.append(FoundBlock((start, key)))
        return found

    def children(self, key: bytes, on_disk: bool = False) -> list[bytes]:
        """Keys of sealed blocks that may continue this one."""
        with self._locked():
            return self.store.children(*split_keys([key]))[:MOST_SIGHTINGS]

    def create(
        self,
        keys: Any,
        layout_id: int,
        priority: int = 35,
        ttl_s: float | None = None,
        token_counts: Sequence[int] | None = None,
        sealing: Writer | None = None,
    ) -> Writer:
        """Claims the keys; the Writer's context seals what was granted, or aborts it on an exception. Raises
        InvalidArgument for token counts that are not those of the keys, and a sealing that is no Writer.
        """
        if not isinstance(sealing, Writer | None):
            raise InvalidArgument(f"sealing is of type {type(sealing).__name__}; it must be a Writer")
        with self._locked():
            names = split_keys(keys)
            check_bounds("layout_id", layout_id, 0, len(self.store.layouts) - 1)
            check_bounds("priority", priority, 0, 100)
            whole_seconds(ttl_s)
            full = self.store.layouts[layout_id][1].block_tokens
            counts = list(
                token_counts
                if token_counts is not None
                else getattr(keys, "token_counts", [full] * len(names))
            )
            if len(counts) != len(names):
                raise InvalidArgument(f"{len(counts)} token counts for {len(names)} keys")
            if counts != list(getattr(keys, "token_counts", counts)):
                raise InvalidArgument(f"token_counts {counts} for chunks of {keys.token_counts} tokens")
            base = getattr(keys, "start_token", 0)
            nothing = [None] * len(names)
            traces = zip(
                getattr(keys, "fingerprints", nothing), getattr(keys, "parent_keys", nothing), strict=True
            )
            for tokens in counts:
                check_bounds("token_counts", tokens, 1, full)
            if sealing is not None:
                sealing.check_given(list(sealing._granted))
                sealing.__exit__(None)  # what is still open
            items = []
            for key, tokens, trace in zip(names, counts, traces, strict=True):
                wanted = (key, layout_id, tokens, base, priority, ttl_s, trace)
                items.append((wanted, self.store.create(self.session, *wanted)))
                base += tokens if hasattr(keys, "start_token") else 0
            return Writer(self, items, keys if hasattr(keys, "parent_keys") else None)

    def delete(self, keys: Any) -> int:
        """Deletes sealed blocks; says how many were there. Their readers keep valid bytes."""
        with self._locked():
            return sum([self.store.delete(key) for key in split_keys(keys)])

    def touch(self, keys: Any) -> int:
        """Counts a use of each block, for eviction, and says how many were there."""
        with self._locked():
            return sum([self.store.touch(key) for key in split_keys(keys)])

    def give_to_device(self, writes: bool = True) -> bool:
        """As KVClient's. The memory is this process's own and goes with it: there is nothing to wait for."""
        return True

    def stats(self) -> dict[str, Any]:
        """The figures KVClient.stats() promises."""
        with self._locked():
            return {**self.store.stats(), "node": ""}

    def close(self) -> None:
        """Ends the session: aborts what is unsealed. Views stay readable. Idempotent."""
        with self.store.changed:
            self._closed.set()
            self.store.sessions.discard(self.session)
            self.store.end(self.session)

    def deadline(self, timeout_s: float | None) -> float:
        """When a wait that begins now ends, by the monotonic clock. Raises InvalidArgument for nan."""
        if timeout_s is not None and math.isnan(timeout_s):
            raise InvalidArgument("timeout_s is nan")
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _locked(self) -> threading.Condition:
        if self._closed.is_set():
            raise Closed("the client was closed")
        return self.store.changed

    def __repr__(self) -> str:
        state = "attached" if self.attached else "closed"
        return f"<InMemoryClient of namespace {self.namespace!r}, {state}>"

    def __enter__(self) -> InMemoryClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
