"""Layers of blocks on their way from a GPU to the store's memory, beside the model.

Owns the stream of one request's copies, what they read from until they are over, and how much of it there may
be. Never waits for the model's own work, but where more than MOST_BYTES are under way: then for the oldest.
Invariant: `then` of a layer is called when its bytes are there, and not before; after settle() nothing is
under way, so that the memory may be anybody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch

from kvclient.errors import KVClientError
from kvclient.hf.cache.staging import host_memory, own_stream
from kvclient.kernels import contract
from kvclient.kernels.host_memory import Taken
from kvclient.kernels.transfer import Copies, queue

DEVICES = ("cuda",)
MOST_BYTES = 256 << 20  # of device memory that waits to be copied


class _Sent(NamedTuple):
    event: int
    taken: Taken
    source: torch.Tensor  # alive until it was read
    then: Callable[[], None]


class Outgoing:
    """Of one request. After settle() it may be used again."""

    def __init__(self, client: Any) -> None:
        self._client, self._library = client, contract.cuda()
        self._under_way: deque[_Sent] = deque()
        self._bytes = 0
        self._stream: int | None = None  # 0: the store, or the device, does not let us

    def send(self, starts: np.ndarray, source: torch.Tensor, then: Callable[[], None]) -> bool:
        """Queues row i of source [blocks, bytes], uint8, contiguous on the device, to this process's address
        starts[i], behind what the current stream has to do. False: this way is closed, and nothing was done.
        """
        if self._stream is None:
            self._open()
        count = source.shape[1]
        sizes = np.full(len(starts), count, np.int64)
        if not self._stream or (taken := host_memory().take(starts, sizes)) is None:
            return False
        event = self._made("kvk_event_create")
        self._check("kvk_event_record", event, own_stream(source.device))
        self._check("kvk_event_wait", event, self._stream)
        sources = source.data_ptr() + taken.items * count + taken.offsets
        queue(self._library, Copies(taken.addresses, sources, taken.sizes), self._stream)
        self._check("kvk_event_record", event, self._stream)
        self._under_way.append(_Sent(event, taken, source, then))
        self._bytes += source.numel()
        while self._bytes > MOST_BYTES and len(self._under_way) > 1:
            self._arrive()
        return True

    def settle(self) -> None:
        """Waits for all that is under way. Idempotent."""
        while self._under_way:
            self._arrive()
        if self._stream:
            self._check("kvk_stream_destroy", self._stream)
            self._stream = None

    def _open(self) -> None:
        try:  # what the device may still write when this process is killed belongs to nobody before that
            allowed = self._client.give_to_device()
        except KVClientError:
            allowed = False
        self._stream = self._made("kvk_stream_create") if allowed else 0
        host_memory().look()

    def _arrive(self) -> None:
        sent = self._under_way.popleft()
        self._check("kvk_event_synchronise", sent.event)
        self._check("kvk_event_destroy", sent.event)
        self._bytes -= sent.source.numel()
        host_memory().give_back(sent.taken)
        sent.then()

    def _made(self, name: str) -> int:
        out = c_void_p()
        contract.check(getattr(self._library, name)(byref(out)), self._library)
        return out.value or 0

    def _check(self, name: str, *arguments: int) -> None:
        contract.check(getattr(self._library, name)(*arguments), self._library)
