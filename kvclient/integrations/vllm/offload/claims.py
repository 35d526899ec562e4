"""What an engine computes at this moment, for the engines beside it: a mark in the store for each block.

Owns the marks: blocks of one byte that are never sealed, under names of their own. vLLM hands a block to its
worker only once it is computed; until then nobody else would know of it. Invariants: no call here waits for
the daemon, a thread does; a mark goes when its block was stored, `lease_s` later at the latest, and with the
engine that set it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvclient._core import DerivedKeys
from kvclient.integrations.health import FAILURES, Health
from kvclient.integrations.marks import MARK
from kvclient.integrations.pages import PENDING

_MARKS = DerivedKeys(b"kvstored: is being computed".ljust(32, b"\0"))


class _Batch:
    """Marks that were set together, and go together."""

    def __init__(self, names: Sequence[bytes], until: float) -> None:
        self.names, self.left, self.until = names, set(names), until
        self.writer: Any = None  # of the thread, which alone sets and lifts


class Claims:
    """Of one engine. Called by vLLM's thread alone."""

    def __init__(self, client: Any, health: Health, lease_s: float) -> None:
        self._client, self._health, self._lease_s = client, health, lease_s
        self._of: dict[bytes, _Batch] = {}
        self._todo: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # not before there is something to do

    def elsewhere(self, names: Sequence[bytes]) -> list[bool]:
        """Whether somebody computes those blocks. Reads shared memory. Raises KVClientError."""
        return [state == PENDING for state in self._client.lookup(_MARKS.listed(list(names))).states]

    def computing(self, names: Sequence[bytes]) -> None:
        """From now on, until done()."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstored-claim", daemon=True)
            self._thread.start()
        batch = _Batch(names, time.monotonic() + self._lease_s)
        self._of.update(dict.fromkeys(names, batch))
        self._todo.put(batch)

    def done(self, names: Sequence[bytes]) -> None:
        """They were stored, or will not be."""
        for name in names:
            if (batch := self._of.pop(name, None)) is not None:
                batch.left.discard(name)
                if not batch.left:
                    self._todo.put(batch)

    def lift_all(self) -> None:
        """Nothing is being computed any more."""
        self.done(list(self._of))

    def close(self) -> None:
        """Lifts all, and waits for it."""
        self.lift_all()
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()

    def _run(self) -> None:
        """A batch that comes is to be set, or lifted if nothing of it is left. Also what nobody lifts goes:
        an engine may make no step for long."""
        layout_id, marked = None, deque[_Batch]()  # the oldest first
        while True:
            wait_s = max(0.0, marked[0].until - time.monotonic()) if marked else None
            try:
                batch = self._todo.get(timeout=wait_s)
                if batch is None:
                    return
            except queue.Empty:
                batch = marked.popleft()
                batch.left.clear()
            try:
                if batch.writer is not None:
                    batch.writer.abort()
                    batch.writer = None
                elif batch.left:
                    layout_id = self._client.register_layout(MARK) if layout_id is None else layout_id
                    batch.writer = self._client.create(_MARKS.listed(batch.names), layout_id)
                    marked.append(batch)
            except FAILURES as error:  # another engine may compute the same: no more than that
                self._health.failed("a mark", error)
            while marked and marked[0].writer is None:
                marked.popleft()
