"""Memory that is free, given back while there is nothing to compute.

Owns when: once a loop has waited for a second, and once behind the requests it had. Never while somebody
waits for a token. What goes is what the attachment keeps for the next request's KV, and what malloc keeps of
activations and, at first, of reading the tokenizer.
"""

from __future__ import annotations

import ctypes
from collections import Counter

from kvclient.hf.attachment.attach import Attachment


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
