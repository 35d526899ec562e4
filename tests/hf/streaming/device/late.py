"""A device that does late what it was asked for: the tests' stand-in where there is no GPU.

Owns streams of copies that are made only when somebody waits for an event behind them; until then a slot has
what was in it before. Products are computed at once, by the calling thread. Invariant: who does not wait
computes from another layer's bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import torch


class Event:
    def __init__(self) -> None:
        self.stream: Any = None
        self.at: float | None = None

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, other: Event) -> float:
        assert self.at is not None and other.at is not None
        return (other.at - self.at) * 1e3

    def come(self) -> None:
        self.at = time.perf_counter()


class Copies:
    """A stream whose work is done when it is waited for."""

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()
        self._lock = threading.RLock()

    def wait_event(self, event: Event) -> None:
        with self._lock:
            self._queue.append(lambda: event.stream.until(event))

    def record_event(self, event: Event) -> Event:
        with self._lock:
            event.stream = self
            self._queue.append(event.come)
        return event

    def ask(self, work: Any) -> None:
        with self._lock:
            self._queue.append(work)

    def until(self, event: Event | None) -> None:
        with self._lock:
            while self._queue and (event is None or not event.query()):
                self._queue.popleft()()


class AtOnce:
    """The stream of who computes."""

    def wait_event(self, event: Event) -> None:
        event.stream.until(event)

    def record_event(self, event: Event) -> Event:
        event.stream = self
        event.come()
        return event

    def until(self, event: Event | None) -> None:
        """All that it was asked for has been done."""

    def ask(self, work: Any) -> None:
        work()


class Memory:
    """A slot: copies into it stand in the current stream; views are tensors."""

    def __init__(self, tensor: torch.Tensor, late: Late) -> None:
        self.tensor, self._late = tensor, late

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def __getitem__(self, part: slice) -> Memory:
        return Memory(self.tensor[part], self._late)

    def view(self, kind: torch.dtype) -> torch.Tensor:
        return self.tensor.view(kind)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._late.current_stream().ask(lambda: self.tensor.copy_(source))


class Late:
    """kvclient.hf.streaming.device.runtime.Runtime over a CPU's memory. has: bytes of the "device"."""

    device = torch.device("cpu")

    def __init__(self, has: int = 1 << 30) -> None:
        self.has, self.streams, self._current = has, [], threading.local()

    def Stream(self) -> Copies:
        self.streams.append(Copies())
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def current_stream(self) -> Any:
        return getattr(self._current, "stream", None) or AtOnce()

    def event(self) -> Event:
        return Event()

    def wait(self, event: Event) -> None:
        event.stream.until(event)

    def memory(self, length: int) -> Any:
        return Memory(torch.full((length,), 255, dtype=torch.uint8), self)

    def kept_for(self, memory: Any, stream: Any) -> Any:
        return memory

    def pinned(self, length: int) -> torch.Tensor:
        return torch.zeros(max(1, length), dtype=torch.uint8)

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def free(self) -> int:
        return self.has

    def reading(self) -> None:
        """It does not count."""

    def lacks(self) -> str | None:
        return None

    def settle(self) -> None:
        for stream in self.streams:
            stream.until(None)
