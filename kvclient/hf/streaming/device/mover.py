"""The mover of a device: from the host's pinned memory into its slots, beside what it computes.

Owns the stream of the copies, and the events between it and the streams that compute. Never waits on the
host. Invariant: the device writes into a slot only behind everything that computes from it, and computes from
a slot only behind the copies into it; both are said to the device, so the host may run ahead of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvclient.hf.streaming.device.spans import Spans
from kvclient.hf.streaming.mover import MemoryMover, Piece

COPY_BYTES = 16 << 20  # at one time: what others send to the device stands behind no more than that


class DeviceMover(MemoryMover):
    """image: the file's bytes as a uint8 tensor in pinned memory; memory: a function of a length that gives
    a slot's uint8 tensor on the device, whose address stays; runtime: the device's (runtime.py).
    """

    def __init__(self, image: Any, memory: Any, runtime: Any) -> None:
        super().__init__(memoryview(image.numpy()))
        self._pinned, self._memory, self._runtime = image, memory, runtime
        self._copies = runtime.Stream()
        self._copied: dict[int, Any] = {}  # by the slot's address: the event behind the last copy into it
        self._layers: dict[int, int] = {}  # and what it brings
        self._computing: dict[int, list[Any]] = {}  # the events behind who may still compute from it
        self._lock = threading.Lock()  # copies of two layers do not mix, so an event is behind its own
        self._taken = threading.local()
        self.spans = Spans()

    def memory(self, length: int) -> Any:
        """A slot, uint8 [length bytes]; given back, it is nobody's before the copies into it are over."""
        return self._runtime.kept_for(self._memory(length), self._copies)

    def fill(self, layer: int, pieces: Sequence[Piece], slot: Any) -> None:
        """Asks for the copies; returns before they are made. Raises StreamingFailed."""
        for piece in pieces:
            self.lies(layer, piece)  # compared with its checksum, once
        key = slot.data_ptr()
        with self._lock:
            for event in self._computing.pop(key, ()):
                self._copies.wait_event(event)
            begun = self._copies.record_event(self._runtime.event())
            at = 0
            with self._runtime.stream(self._copies):
                for piece in pieces:
                    for start in range(0, piece.length, COPY_BYTES):
                        length = min(COPY_BYTES, piece.length - start)
                        first = piece.offset + start
                        source = self._pinned[first : first + length]
                        slot[at : at + length].copy_(source, non_blocking=True)
                        at += length
            copied = self._copies.record_event(self._runtime.event())
            self._copied[key], self._layers[key] = copied, layer
        self.spans.add("copy", layer, begun, copied)

    def taken(self, slot: Any) -> None:
        """The calling thread's stream computes from the slot from here on."""
        key = slot.data_ptr()
        with self._lock:
            event, layer = self._copied[key], self._layers[key]
        stream = self._runtime.current_stream()
        asked = stream.record_event(self._runtime.event())
        stream.wait_event(event)
        there = stream.record_event(self._runtime.event())
        self.spans.add("wait", layer, asked, there)
        self._since()[key] = layer, there

    def given_back(self, slot: Any) -> None:
        """What the calling thread's stream was asked for until here is all that it computes from the slot."""
        key = slot.data_ptr()
        event = self._runtime.current_stream().record_event(self._runtime.event())
        with self._lock:  # of a layer that stays in its slot, no more than have not passed
            left = [earlier for earlier in self._computing.get(key, ()) if not earlier.query()]
            self._computing[key] = [*left, event]
        if (began := self._since().pop(key, None)) is not None:
            self.spans.add("compute", began[0], began[1], event)

    def _since(self) -> dict[int, tuple[int, Any]]:
        """Of the calling thread, by the slot's address: the layer, and the event from which it computes."""
        found: dict[int, tuple[int, Any]] = self._taken.__dict__.setdefault("since", {})
        return found

    def rate(self, layer: int, pieces: Sequence[Piece], slot: Any, rounds: int = 3) -> float:
        """Bytes a second of a layer's copies into a slot that nobody computes from: the best round. Waits
        for the device.
        """
        least = float("inf")
        for _ in range(rounds):
            self.fill(layer, pieces, slot)
            self._runtime.settle()
            least = min(least, self.spans.last_s("copy"))
        return sum(piece.length for piece in pieces) / max(least, 1e-9)
