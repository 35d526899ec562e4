"""What one generate() call did with the store, and the sums over all calls.

Owns the numbers' names; measures nothing itself. Invariant: a call is counted once, also when it failed or
the store stayed out of it, and then says why.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """One call. Times in seconds of wall time; tokens summed over the rows of the batch. Where the store was
    left out (`bypassed` says why) only total_s is measured."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # handed over instead of computed; at most the prompt minus one
    reused_by_tier: dict[str, int] = field(default_factory=lambda: {"shm": 0, "disk": 0, "peer": 0})
    approximate_tokens: int = 0  # found inside the prompt, computed behind other tokens; not in reused_tokens
    approximate_from_disk: int = 0  # of the approximate ones: what this call had loaded
    recomputed_tokens: int = 0  # of the approximate ones: repaired in the layers behind the check
    followed_tokens: int = 0  # of the reused ones: taken while another process was still computing them
    published_blocks: int = 0
    lookup_s: float = 0.0  # keys, look-up, pins, claims
    load_s: float = 0.0  # copying KV to where the model reads it
    wait_s: float = 0.0  # for another process's layers
    publish_s: float = 0.0  # copying KV into blocks, and sealing
    prefill_s: float = 0.0  # the model itself, without the above
    ttft_s: float = 0.0  # from the call of generate() to the first token, everything included
    total_s: float = 0.0
    bypassed: str | None = None  # why the store was not read or written at all: a word
    bypass_detail: str | None = None  # …and in full, where the word does not say it
    read_bypassed: str | None = None  # why it was only written
    write_bypassed: str | None = None  # why it was only read, or, "changed", only written until then
    dense: str | None = None  # why not, or no longer, in place: the word that attention.fallbacks() counts
    followed_lost: int = 0  # writers that were followed and ended; the tokens were computed instead
    no_space: int = 0  # blocks the pool had no room for
    unavailable: int = 0  # blocks that no store was there to take (on_error="miss")
    lost_blocks: int = 0  # claimed, but not sealed: the daemon went, or the claim ended, meanwhile
    full_tokens: int = 0  # of the reused ones, with a codec: taken as computed (first and last of a prompt)
    published_full_blocks: int = 0  # those of such tokens; not in published_blocks
    not_quantisable: int = 0  # blocks the codec cannot hold: beyond 65504, or not finite. Not stored
    disk_refused: int = 0  # rows whose blocks on disk were not waited for: computing them was sooner


class Totals:
    """Sums over calls. Thread-safe."""

    _SUMMED = (
        "prompt_tokens", "reused_tokens", "approximate_tokens", "approximate_from_disk", "recomputed_tokens",
        "followed_tokens",
        "published_blocks", "published_full_blocks", "followed_lost", "no_space", "not_quantisable",
        "disk_refused", "full_tokens", "unavailable", "lost_blocks",
        "lookup_s", "load_s", "wait_s", "publish_s", "prefill_s", "ttft_s", "total_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._bypassed: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()  # reused tokens

    def add(self, report: Report) -> None:
        with self._lock:
            self._sums["requests"] += 1
            self._sums["hits"] += report.reused_tokens + report.approximate_tokens > 0
            for name in self._SUMMED:
                self._sums[name] += getattr(report, name)
            self._tiers.update(report.reused_by_tier)
            for reason in (report.bypassed, report.read_bypassed, report.write_bypassed):
                if reason is not None:
                    self._bypassed[reason] += 1

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            known = dict.fromkeys(("requests", "hits", *self._SUMMED), 0)
            tiers = {**Report().reused_by_tier, **self._tiers}
            return {**known, **self._sums, "reused_by_tier": tiers, "bypassed": dict(self._bypassed)}
