"""What on_error="miss" means: a store that cannot be reached counts as empty, and inference goes on.

Owns the policy, nothing else; KVClient does the work. Invariant: only the store being unreachable becomes a
miss, each time counted; the caller's own errors are raised as ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS, MAX_LOAD_BYTES, layout_blob
from kvclient.checks import check_bounds, whole_seconds
from kvclient.client.breaker import NoBlocks, NoLookup, NoWriter
from kvclient.client.client import Answer, KVClient
from kvclient.errors import (
    BlockLost,
    Closed,
    DeadlineExceeded,
    Detached,
    IncompatibleVersion,
    LayoutLost,
    Unavailable,
)

if TYPE_CHECKING:
    from kvclient._core import FoundBlock

UNREACHABLE = (Unavailable, DeadlineExceeded, IncompatibleVersion)
MAX_PATIENCE_S = 0.5  # for a daemon that is starting: then the prompt is computed
PROMISED_FIGURES = (
    "used_bytes", "capacity_bytes", "faulted_bytes", "blocks", "pins", "sessions",
    "hits", "misses", "evictions",
    "disk_files", "disk_bytes", "disk_quota_bytes", "disk_loaded", "disk_written",
)  # fmt: skip


class TolerantClient(KVClient):
    """A KVClient to which a store that cannot be reached is empty, and is asked again after a backoff.

    Look-ups and gets that shared memory can answer are answered, whatever the breaker says.
    """

    def _first_attach(self) -> None:
        self._patience_s = min(self._patience_s, MAX_PATIENCE_S)
        self._lookup = self._get = self._no_memory
        try:
            self._bind(self._attach())
        except UNREACHABLE as error:
            self._breaker.failed(error)
            self.suppressed_total += 1

    @staticmethod
    def _no_memory(*_args: object) -> Any:
        raise Detached("not attached yet")

    def lookup(self, keys: Any, peers: bool = False) -> Any:
        try:
            return self._lookup(keys, True) if peers else self._lookup(keys)
        except UNREACHABLE as error:
            self._heed(error)
            asked = (keys, True) if peers else (keys,)
            return self._tolerate(lambda native: native.lookup(*asked), lambda: NoLookup(_count(keys)))

    def get(self, keys: Any, follow: bool = False, wait_s: float = 0.0, verify: bool = False) -> Any:
        try:
            if wait_s or verify:
                return self._get(keys, follow, wait_s, verify)
            return self._get(keys, True) if follow else self._get(keys)
        except UNREACHABLE as error:
            self._heed(error)
            return self._tolerate(
                lambda native: native.get(keys, follow, wait_s, verify), lambda: NoBlocks(_count(keys))
            )

    def prefetch(self, keys: Any, priority: int = 35, node: str = "") -> int:
        return self._tolerate(lambda native: native.prefetch(keys, priority, node), lambda: 0)

    def push(self, keys: Any, to: str) -> int:
        return self._tolerate(lambda native: native.push(keys, to), lambda: 0)

    def load_estimate_s(self, length_bytes: int) -> float | None:
        check_bounds("length_bytes", length_bytes, 0, MAX_LOAD_BYTES)
        seconds = self._tolerate(lambda native: native.load_estimate_s(length_bytes), lambda: -1.0)
        return None if seconds < 0 else seconds

    def peer_estimate_s(self, length_bytes: int) -> float | None:
        check_bounds("length_bytes", length_bytes, 0, MAX_LOAD_BYTES)
        seconds = self._tolerate(lambda native: native.peer_estimate_s(length_bytes), lambda: -1.0)
        return None if seconds < 0 else seconds

    def peers_up(self) -> int:
        return self._tolerate(lambda native: native.peers_up(), lambda: 0)

    def find(
        self, identity: bytes, token_ids: Any, block_tokens: int = DEFAULT_BLOCK_TOKENS, on_disk: bool = False
    ) -> list[FoundBlock]:
        return self._tolerate(lambda native: native.find(identity, token_ids, block_tokens, on_disk), list)

    def children(self, key: bytes, on_disk: bool = False) -> list[bytes]:
        return self._tolerate(lambda native: native.children(key, on_disk), list)

    def create(
        self,
        keys: Any,
        layout_id: int,
        priority: int = 35,
        ttl_s: float | None = None,
        token_counts: Sequence[int] | None = None,
        sealing: Any = None,
    ) -> Any:
        seconds = whole_seconds(ttl_s)

        def ask(native: Any) -> Any:
            attachment, moved = self._ids
            if layout_id < 0 and layout_id not in moved and layout_id in self._layouts:
                moved[layout_id] = native.register_layout(self._layouts[layout_id])
            here = moved.get(layout_id, layout_id)
            earlier = getattr(sealing, "_writer", sealing)
            earlier = None if isinstance(earlier, NoWriter) else earlier
            try:
                try:
                    made = native.create(keys, here, priority, seconds, token_counts, earlier, attachment)
                except LayoutLost:
                    here = self._registered_again(native, layout_id)
                    made = native.create(keys, here, priority, seconds, token_counts, earlier, attachment)
            except BlockLost:  # the earlier writer's: counted and forgotten, as in its own seal()
                self.suppressed_total += 1
                made = native.create(keys, here, priority, seconds, token_counts, None, attachment)
            return TolerantWriter(self, made)

        return self._tolerate(ask, lambda: NoWriter(_count(keys)))

    def delete(self, keys: Any) -> int:
        return self._tolerate(lambda native: native.delete(keys), lambda: 0)

    def touch(self, keys: Any) -> int:
        return self._tolerate(lambda native: native.touch(keys), lambda: 0)

    def stats(self) -> dict[str, Any]:
        """As ever, or 0 for each of the promised figures while there is no store."""
        return self._tolerate(lambda native: {"node": "", **json.loads(native.stats())}, self._no_figures)

    @staticmethod
    def _no_figures() -> dict[str, Any]:
        return {**dict.fromkeys(PROMISED_FIGURES, 0), "node": ""}

    def grpc_token(self) -> str:
        """Raises Unavailable without a store: no token would open anything."""
        if self._native is None:
            return self._again(lambda native: native.grpc_token())
        return super().grpc_token()

    def register_layout(self, layout: Any) -> int:
        """Without a store the layout gets an id of this client's, and is registered when it attaches."""
        blob = layout_blob(layout)
        with self._lock:  # what is remembered is of the attachment that was asked
            found = self._tolerate(lambda native: native.register_layout(blob), lambda: None)
            if found is not None:
                return self._remember(blob, found)
            return self._remember(blob, min((-1, *(told - 1 for told in self._layouts))))

    def _heed(self, error: Exception) -> None:
        """Memory that was attached and is not current any more belongs to a daemon that has begun anew."""
        if isinstance(error, Detached) and self._native is not None:
            self._breaker.hurry()

    def _tolerate(self, ask: Callable[[Any], Answer], without: Callable[[], Answer]) -> Answer:
        if self._closed:
            raise Closed("the client was closed")
        if not self._breaker.may_ask():
            self.suppressed_total += 1
            return without()
        try:
            answer = self._again(ask) if self._native is None else self._call(ask)
        except UNREACHABLE as error:
            self._breaker.failed(error)
            self.suppressed_total += 1
            return without()
        except BaseException:
            self._breaker.succeeded()  # whatever is wrong, the store answered
            raise
        self._breaker.succeeded()
        return answer


class TolerantWriter:
    """A Writer whose store may go away: what cannot be sealed is counted and forgotten."""

    def __init__(self, client: TolerantClient, writer: Any) -> None:
        self._client, self._writer = client, writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def __len__(self) -> int:
        return len(self._writer)

    def __getitem__(self, index: int) -> Any:
        return self._writer[index]

    def seal(self, index: int | None = None, zero_rest: bool = False) -> bool:
        """False if that could not be: then nobody will find what was to be sealed."""
        return self._forgive(self._writer.seal, index, zero_rest) is not False

    def abort(self, index: int | None = None) -> None:
        """Gives the block of this index back unsealed, or all of them; a failing store is no error here."""
        self._forgive(self._writer.abort, index)

    def wait_pending(self, timeout_s: float | None = None) -> Any:
        """Until the blocks that others write are sealed: whether they are. None from a failing store."""
        return self._forgive(self._writer.wait_pending, timeout_s)

    def __enter__(self) -> TolerantWriter:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._forgive(self._writer.__exit__, *exc)

    def _forgive(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except (*UNREACHABLE, BlockLost):
            self._client.suppressed_total += 1
            return False


def _count(keys: Any) -> int:
    packed = getattr(keys, "packed_keys", keys)
    return len(packed) if isinstance(packed, (list, tuple)) else len(memoryview(packed)) // 32
