"""Layers of blocks on their way from a GPU to the store's memory, beside the model.

Owns the stream of one request's copies and the thread that carries them, what they read from until they are
over, and how much of it there may be. The device writes into pinned slots of this process, and the thread
carries the bytes on: making a pool's fresh memory known to a device takes longer than copying it, and what no
device was told of, none can write to after this process is killed. Never waits for the model's work, but
where more than MOST_BYTES are under way: then for the oldest. Invariant: `then` of a layer is called by who
sends, when its bytes are there and not before; after settle() nothing is under way, so that the memory may be
anybody's.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch

from kvclient.hf.cache.staging import own_stream
from kvclient.kernels import contract
from kvclient.kernels.transfer import Copies, queue

DEVICES = ("cuda",)
MOST_BYTES = 1 << 30  # of device memory that waits to be copied
SLOT_BYTES = 32 << 20
SLOTS = 2  # of one request: one is filled while the other is emptied
MOST_SPARE = 4  # kept for the next requests

_spare: list[tuple[Any, int]] = []  # (library, address of a slot)
_spare_lock = threading.Lock()


class _Sent(NamedTuple):
    copied: Future[None]
    size: int
    then: Callable[[], None]


class Outgoing:
    """Of one request. After settle() it may be used again."""

    def __init__(self) -> None:
        self._library = contract.cuda()
        self._under_way: deque[_Sent] = deque()
        self._bytes, self._stream = 0, 0
        self._thread: ThreadPoolExecutor | None = None
        self._slots: list[tuple[int, int]] = []  # (address, event of the last copy into it)

    def send(self, starts: np.ndarray, source: torch.Tensor, then: Callable[[], None]) -> None:
        """Has row i of source [blocks, bytes], uint8, contiguous on the device, brought to this process's
        address starts[i], behind what the current stream has to do.
        """
        with torch.cuda.device(source.device) if source.is_cuda else contextlib.nullcontext():
            if self._thread is None:
                self._stream = self._stream or self._made("kvk_stream_create")
                while len(self._slots) < SLOTS:
                    self._slots.append((self._slot(), self._made("kvk_event_create")))
                self._thread = ThreadPoolExecutor(1, "kvclient-outgoing")
            ready = self._made("kvk_event_create")
            self._check("kvk_event_record", ready, own_stream(source.device))
        copied = self._thread.submit(self._carry, starts, source, ready)
        self._under_way.append(_Sent(copied, source.numel(), then))
        self._bytes += source.numel()
        while self._under_way and (self._bytes > MOST_BYTES or self._under_way[0].copied.done()):
            self._arrive()

    def settle(self) -> None:
        """Waits for all that is under way. Idempotent. Raises what a copy or a `then` raised."""
        try:
            while self._under_way:
                self._arrive()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread, self._bytes = None, 0
            self._under_way.clear()
            self._give_up()

    def _carry(self, starts: np.ndarray, source: torch.Tensor, ready: int) -> None:
        """The thread's: returns when the bytes are there."""
        if source.is_cuda:
            torch.cuda.set_device(source.device)
        self._check("kvk_event_wait", ready, self._stream)
        filled: deque[tuple[int, int, int, int]] = deque()  # (slot, its event, first byte, bytes)
        for number, at in enumerate(range(0, source.numel(), SLOT_BYTES)):
            slot, event = self._slots[number % SLOTS]
            if len(filled) == SLOTS:
                self._empty(starts, source.shape[1], *filled.popleft())
            size = min(SLOT_BYTES, source.numel() - at)
            place = (slot, source.data_ptr() + at, size)
            queue(self._library, Copies(*(np.array([x], np.int64) for x in place)), self._stream)
            self._check("kvk_event_record", event, self._stream)
            filled.append((slot, event, at, size))
        while filled:
            self._empty(starts, source.shape[1], *filled.popleft())
        self._check("kvk_event_destroy", ready)

    def _empty(
        self, starts: np.ndarray, row_bytes: int, slot: int, event: int, first: int, size: int
    ) -> None:
        """Bytes first..first + size of all rows are in the slot, once its event is over."""
        self._check("kvk_event_synchronise", event)
        at = first
        while at < first + size:
            row, offset = divmod(at, row_bytes)
            count = min(row_bytes - offset, first + size - at)
            ctypes.memmove(int(starts[row]) + offset, slot + at - first, count)
            at += count

    def _arrive(self) -> None:
        sent = self._under_way.popleft()
        sent.copied.result()
        self._bytes -= sent.size
        sent.then()

    def _slot(self) -> int:
        with _spare_lock:
            for index, (library, address) in enumerate(_spare):
                if library is self._library:
                    del _spare[index]
                    return address
        out = c_void_p()
        contract.check(self._library.kvk_host_allocate(SLOT_BYTES, byref(out)), self._library)
        return out.value or 0

    def _give_up(self) -> None:
        for address, event in self._slots:
            self._check("kvk_event_destroy", event)
            with _spare_lock:
                if kept := len(_spare) < MOST_SPARE:
                    _spare.append((self._library, address))
            if not kept:
                self._check("kvk_host_free", address)
        self._slots = []
        if self._stream:
            self._check("kvk_stream_destroy", self._stream)
            self._stream = 0

    def _made(self, name: str) -> int:
        out = c_void_p()
        contract.check(getattr(self._library, name)(byref(out)), self._library)
        return out.value or 0

    def _check(self, name: str, *arguments: int) -> None:
        contract.check(getattr(self._library, name)(*arguments), self._library)
