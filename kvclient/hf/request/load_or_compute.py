"""Whether to wait for the disk and other hosts or to compute: what prefill takes here, against what the
daemon measured of loads and fetches.

Owns the measured speed of prefill, one number per attachment, shared by its threads. Never loads anything.
Invariant: what was never measured is no reason to refuse; the first load and the first prefill measure both.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

MIN_TOKENS = 32  # a prefill of fewer says little about speed
WEIGHT = 0.3  # of the newest measurement
UNMEASURED_WAIT_S = 2.0  # the longest wait for a load while nothing is known about prefill


class PrefillSpeed:
    """Seconds of prefill per token, as a moving average."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token_s: float | None = None

    def note(self, tokens: int, prefill_s: float) -> None:
        """So many tokens, MIN_TOKENS at least, were computed in so many seconds."""
        with self._lock:
            new = prefill_s / tokens
            self._token_s = new if self._token_s is None else self._token_s + WEIGHT * (new - self._token_s)

    def prefill_s(self, tokens: int) -> float | None:
        """What computing so many tokens would take; None: nothing was computed yet."""
        return None if self._token_s is None else self._token_s * tokens

    def patience_s(self, client: Any, tokens: int, disk_bytes: int, peer_bytes: int = 0) -> float:
        """How long to wait for blocks of so many tokens to come, so many bytes from disk and so many from
        other hosts, which go beside each other. 0: computing them is sooner."""
        compute_s = self.prefill_s(tokens)
        if compute_s is None:
            return UNMEASURED_WAIT_S
        load_s = client.load_estimate_s(disk_bytes) if disk_bytes or not peer_bytes else None
        fetch_s = client.peer_estimate_s(peer_bytes) if peer_bytes else None
        return 0.0 if max(load_s or 0.0, fetch_s or 0.0) >= compute_s else compute_s


class WaitBudget:
    """How long one request waits for what lies below: for a stretch no longer than it is worth, for all of
    them together no longer than computing the whole prompt would take, however many a disk or a peer that
    hangs holds up.
    """

    def __init__(self, pace: PrefillSpeed, client: Any, prompt_tokens: int) -> None:
        self._pace, self._client, self._prompt_tokens = pace, client, prompt_tokens
        self._ends_s: float | None = None  # of the clock; from the first wait on

    def wait_s(self, tokens: int, disk_bytes: int, peer_bytes: int = 0) -> float:
        """How long to wait for so many tokens, and bytes of either. 0: computing them is sooner."""
        wait_s = self._pace.patience_s(self._client, tokens, disk_bytes, peer_bytes)
        if wait_s == 0:
            return 0.0
        now_s = monotonic()
        if self._ends_s is None:
            self._ends_s = now_s + max(wait_s, self._pace.patience_s(self._client, self._prompt_tokens, 0))
        return max(0.0, min(wait_s, self._ends_s - now_s))
