"""Layers of blocks on their way from a GPU to the store's memory, beside the model.

Owns the stream of one request's copies and the thread that queues them, what they read from until they are
over, and how much of it there may be. There is a thread because making host memory known to the device takes
longer than the copies: milliseconds for 64 MiB. Never waits for the model's work, but where more than
MOST_BYTES are under way: then for the oldest. Invariant: `then` of a layer is called by who sends, when its
bytes are there and not before; after settle() nothing is under way, so that the memory may be anybody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch

from kvclient.errors import KVClientError
from kvclient.hf.cache.staging import host_memory, own_stream
from kvclient.kernels import contract
from kvclient.kernels.transfer import Copies, queue

DEVICES = ("cuda",)
MOST_BYTES = 1 << 30  # of device memory that waits to be copied


class _Sent(NamedTuple):
    copied: Future[None]
    size: int
    then: Callable[[], None]


class Outgoing:
    """Of one request. After settle() it may be used again."""

    def __init__(self, client: Any) -> None:
        self._client, self._library = client, contract.cuda()
        self._under_way: deque[_Sent] = deque()
        self._bytes, self._stream = 0, 0
        self._thread: ThreadPoolExecutor | None = None
        self._allowed: bool | None = None  # None: the store was not asked

    def send(self, starts: np.ndarray, source: torch.Tensor, then: Callable[[], None]) -> bool:
        """Queues row i of source [blocks, bytes], uint8, contiguous on the device, to this process's address
        starts[i], behind what the current stream has to do. False: the store waits for no device, so it must
        not write there; nothing was done.
        """
        if self._allowed is None:
            self._allowed = self._ask()
        if not self._allowed:
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvclient-outgoing")
            self._stream = self._made("kvk_stream_create")
            host_memory().look()
        ready = self._made("kvk_event_create")
        self._check("kvk_event_record", ready, own_stream(source.device))
        device = source.device.index or 0
        copied = self._thread.submit(self._copy, starts, source, ready, device)
        self._under_way.append(_Sent(copied, source.numel(), then))
        self._bytes += source.numel()
        while self._under_way and (self._bytes > MOST_BYTES or self._under_way[0].copied.done()):
            self._arrive()
        return True

    def settle(self) -> None:
        """Waits for all that is under way. Idempotent. Raises what a copy or a `then` raised."""
        try:
            while self._under_way:
                self._arrive()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._check("kvk_stream_destroy", self._stream)
                self._under_way.clear()
                self._thread, self._bytes = None, 0

    def _ask(self) -> bool:
        """Whether what the device may still write when this process is killed is nobody's before that."""
        try:
            return bool(self._client.give_to_device())
        except KVClientError:
            return False

    def _copy(self, starts: np.ndarray, source: torch.Tensor, ready: int, device: int) -> None:
        """The thread's: returns when the bytes are there."""
        if source.is_cuda:
            torch.cuda.set_device(device)
        self._check("kvk_event_wait", ready, self._stream)
        count, sizes = source.shape[1], np.full(len(starts), source.shape[1], np.int64)
        taken = host_memory().take(starts, sizes)
        if taken is None:  # what the device cannot be told of comes through the driver's own buffers
            sources = source.data_ptr() + np.arange(len(starts), dtype=np.int64) * count
            queue(self._library, Copies(starts, sources, sizes), self._stream)
        else:
            sources = source.data_ptr() + taken.items * count + taken.offsets
            queue(self._library, Copies(taken.addresses, sources, taken.sizes), self._stream)
        self._check("kvk_event_record", ready, self._stream)
        self._check("kvk_event_synchronise", ready)
        self._check("kvk_event_destroy", ready)
        if taken is not None:
            host_memory().give_back(taken)

    def _arrive(self) -> None:
        sent = self._under_way.popleft()
        sent.copied.result()
        self._bytes -= sent.size
        sent.then()

    def _made(self, name: str) -> int:
        out = c_void_p()
        contract.check(getattr(self._library, name)(byref(out)), self._library)
        return out.value or 0

    def _check(self, name: str, *arguments: int) -> None:
        contract.check(getattr(self._library, name)(*arguments), self._library)
