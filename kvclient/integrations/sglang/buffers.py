"""A page of SGLang's host pools as buffers of bytes: in place where the pool says where its pages lie, else
as a flat copy.

Owns nothing; never knows a key. Invariant: what get() fills is just what put() would read of the same page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class InPlace:
    """The interface of zero copies: pointers into the pool's own memory."""

    form = "in place"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = pool.page_size * getattr(pool, "dcp_size", 1)
        self.sizes = [buffer.nbytes for buffer in self.of(torch.arange(self.page_tokens), 1)[0]]

    def of(self, host_indices: torch.Tensor, count: int) -> list[list[np.ndarray]]:
        """The buffers of each of `count` pages, as bytes [length], where the pool has them. host_indices
        [tokens]. Raises ValueError where the pool's buffers do not divide evenly.
        """
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        if isinstance(sizes, int):
            sizes = [sizes] * len(pointers)
        each, rest = divmod(len(pointers), count)
        if rest or len(sizes) != len(pointers):
            raise ValueError(f"{len(pointers)} pointers and {len(sizes)} sizes for {count} pages")
        memory = [
            np.frombuffer((ctypes.c_uint8 * size).from_address(at), np.uint8)
            for at, size in zip(pointers, sizes, strict=True)
        ]
        return [memory[i * each : (i + 1) * each] for i in range(count)]

    def loaded(self, host_indices: torch.Tensor, pages: Sequence[Any], found: Sequence[bool]) -> None:
        """The bytes are where they belong. host_indices [tokens]."""


class Flat:
    """The older interface: a page is taken out of the pool, and put back, as one tensor."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = (getattr(pool, "page_size", 1) or 1) * getattr(pool, "dcp_size", 1)
        empty = pool.get_dummy_flat_data_page()
        self.sizes = [empty.numel() * empty.element_size()]

    def of(self, host_indices: torch.Tensor, count: int) -> list[list[np.ndarray]]:
        """Copies of the pages as bytes [length], to be stored. host_indices [tokens]."""
        starts = host_indices[:: self.page_tokens].tolist()
        return [[as_bytes(self._pool.get_data_page(at, flat=True))] for at in starts[:count]]

    def empty(self, count: int) -> list[torch.Tensor]:
        """Pages [elements] to load into."""
        return [self._pool.get_dummy_flat_data_page() for _ in range(count)]

    def loaded(
        self, host_indices: torch.Tensor, pages: Sequence[torch.Tensor], found: Sequence[bool]
    ) -> None:
        """Puts into the pool what was loaded into empty()'s pages [elements]. host_indices [tokens]."""
        starts = host_indices[:: self.page_tokens].tolist()
        for at, page, there in zip(starts, pages, found, strict=True):
            if there:
                self._pool.set_from_flat_data_page(at, page)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory as bytes [length] where it is contiguous and on the host; else a copy."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def buffers_of(pool: Any, in_place: bool) -> InPlace | Flat:
    """In place if that is wanted and the pool can; sidecar pools differ in it."""
    if in_place and hasattr(pool, "get_page_buffer_meta"):
        try:
            return InPlace(pool)
        except (NotImplementedError, ValueError):
            pass  # a layout whose pages lie nowhere in one piece
    return Flat(pool)
