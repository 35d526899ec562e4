"""The mover of a device: from the host's pinned memory into its slots, beside what it computes.

Owns the stream of the copies, and the events between it and the streams that compute. Never waits on the
host. Invariant: the device writes into a slot only behind everything that computes from it, and computes from
a slot only behind the copies into it; both are said to the device, so the host may run ahead of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from kvclient.hf.streaming.mover import MemoryMover, Piece


class Runtime(Protocol):
    """What of `torch.cuda` is used: `Stream` with wait_event() and record_event(), stream(), and
    current_stream().
    """

    def Stream(self) -> Any:
        """A new stream."""

    def stream(self, stream: Any) -> Any:
        """A context in which copies stand in this stream."""

    def current_stream(self) -> Any:
        """That the calling thread computes in."""


class DeviceMover(MemoryMover):
    """image: the file's bytes as a uint8 tensor in pinned memory; memory: a function of a length that gives
    a slot's uint8 tensor on the device, whose address stays; runtime: `torch.cuda`.
    """

    def __init__(self, image: Any, memory: Any, runtime: Runtime) -> None:
        super().__init__(memoryview(image.numpy()))
        self._pinned, self.memory, self._runtime = image, memory, runtime
        self._copies = runtime.Stream()
        self._copied: dict[int, Any] = {}  # by the slot's address: the event behind the last copy into it
        self._computing: dict[int, list[Any]] = {}  # the events behind who may still compute from it
        self._lock = threading.Lock()  # copies of two layers do not mix, so an event is behind its own

    def fill(self, layer: int, pieces: Sequence[Piece], slot: Any) -> None:
        """Asks for the copies; returns before they are made. Raises StreamingFailed."""
        for piece in pieces:
            self.lies(layer, piece)  # compared with its checksum, once
        key = slot.data_ptr()
        with self._lock:
            for event in self._computing.pop(key, ()):
                self._copies.wait_event(event)
            at = 0
            with self._runtime.stream(self._copies):
                for piece in pieces:
                    source = self._pinned[piece.offset : piece.offset + piece.length]
                    slot[at : at + piece.length].copy_(source, non_blocking=True)
                    at += piece.length
            self._copied[key] = self._copies.record_event()

    def taken(self, slot: Any) -> None:
        """The calling thread's stream computes from the slot from here on."""
        with self._lock:
            event = self._copied[slot.data_ptr()]
        self._runtime.current_stream().wait_event(event)

    def given_back(self, slot: Any) -> None:
        """What the calling thread's stream was asked for until here is all that it computes from the slot."""
        event = self._runtime.current_stream().record_event()
        with self._lock:
            self._computing.setdefault(slot.data_ptr(), []).append(event)
