"""Memory that is free, given back while there is nothing to compute.

Owns when: once a loop has waited for a second, and once behind the requests it had. Never while somebody
waits for a token. What goes is what the attachment keeps for the next request's KV, and what malloc keeps of
activations and, at first, of reading the tokenizer. Owns too what malloc never keeps: large blocks.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter

from kvclient.hf.attachment.attach import Attachment

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGE_BYTES, KEPT_BYTES = 4 << 20, 32 << 20


def large_blocks_apart() -> None:
    """From now on malloc gives back a block of LARGE_BYTES when it is freed, and of the others what is free
    beyond KEPT_BYTES at the end. By itself it keeps blocks of up to 32 MiB once one was freed, and what a
    request's KV left lies between those of others. What the environment says of malloc stays.
    """
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if not told and (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's
        set_option(MMAP_THRESHOLD, LARGE_BYTES)
        set_option(TRIM_THRESHOLD, KEPT_BYTES)


class Idle:
    """Of one loop's thread, which counts `requests_total`."""

    def __init__(self, kv: Attachment, counts: Counter[str]) -> None:
        self._kv, self._counts, self._seen = kv, counts, -1

    def __call__(self) -> None:
        """There is nothing to do, for a second already."""
        if self._seen != (seen := self._counts["requests_total"]):
            self._seen = seen
            self._kv.give_back()
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
                trim(0)
