"""Rows from a device to the host, which multiplies them, and what comes out back again.

Owns the memory that both see, and the waits between them. Never chooses who computes. Invariant: the host
reads rows only behind the device's writing of them, and writes results only behind the device's reading of
what lay there before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvclient.hf.streaming.device.runtime import Runtime

Multiply = Callable[[torch.Tensor, torch.Tensor], None]


class _Desk:
    """For one call at a time: rows on their way to the host, results on their way back, fp32. host: as the
    host sees them; device: as the device does; behind: the event behind what the device was asked to do here.
    """

    def __init__(self, runtime: Runtime, rows: int, results: int) -> None:
        """Elements of either."""
        self.host = [runtime.pinned(4 * count).view(torch.float32) for count in (rows, results)]
        self.device = [runtime.mapped(memory) for memory in self.host]
        self.behind: Any = None

    def sides(self, which: int, rows: int, width: int) -> tuple[Any, Any]:
        """Of rows (0) or results (1), [rows, width] for the host and for the device."""
        host, device = self.host[which], self.device[which]
        return host[: rows * width].view(rows, width), device[: rows * width].view(rows, width)


class Exchange:
    """For any number of threads. most: rows in a call; inputs, outputs: of the widest product."""

    def __init__(self, runtime: Runtime, most: int, inputs: int, outputs: int) -> None:
        self._runtime, self.most, self._sizes = runtime, most, (most * inputs, most * outputs)
        self._free: list[_Desk] = []
        self._lock = threading.Lock()

    def multiplied(self, x: torch.Tensor, outputs: int, multiply: Multiply) -> torch.Tensor:
        """[..., outputs] on the device, of the type of x [..., inputs], which are 1 to `most` rows there, in
        16 bits. multiply: gets fp32 [rows, inputs] and fills fp32 [rows, outputs], both of the host. Waits
        for x. Both ways are a kernel's that changes the type, over the link: a copy would stand behind those
        of whole layers.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        with self._desk() as desk:
            asked, seen = desk.sides(0, *rows.shape)
            made, back = desk.sides(1, len(rows), outputs)
            seen.copy_(rows)
            self._runtime.wait(self._runtime.current_stream().record_event(self._runtime.event()))
            multiply(asked, made)
            found: torch.Tensor = back.to(x.dtype)
        return found.reshape(*x.shape[:-1], outputs)

    @contextlib.contextmanager
    def _desk(self) -> Iterator[_Desk]:
        """One that the calling thread's stream may write to. It comes back, whatever happens, and the next
        one's stream waits for what this one's was asked.
        """
        with self._lock:
            desk = self._free.pop() if self._free else None
        if desk is None:
            desk = _Desk(self._runtime, *self._sizes)
        stream = self._runtime.current_stream()
        try:
            if desk.behind is not None:
                stream.wait_event(desk.behind)
            yield desk
        finally:
            desk.behind = stream.record_event(self._runtime.event())
            with self._lock:
                self._free.append(desk)
