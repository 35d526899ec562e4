"""Whether the store an engine goes on without is there: one log line when it goes, one when it is back.

Owns the line, the count and the gauge; never decides anything. Invariants: a line is written only when the
state changes, so an engine that runs for days without its store has one line of it, which says since when
and why; the store is back when the daemon is there and nothing has failed since the last look.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from datetime import datetime
from typing import Any

from kvclient.errors import KVClientError

# What a call of the store becomes a miss for: its own errors, the system's, and what native code, NumPy and
# torch raise for what they cannot do. All else (AssertionError, TypeError, KeyError) is a broken invariant.
FAILURES = (KVClientError, OSError, RuntimeError, ValueError, MemoryError)


class _Figures:
    """`<engine>:kvstored_degraded` and `<engine>:kvstored_failures_total` of this process, where the engine's
    own figures are: in prometheus_client. One that cannot be made is left out, and a line says so.
    Thread-safe."""

    def __init__(self, engine: str, client: Any, logger: logging.Logger) -> None:
        self._away: weakref.WeakSet[Health] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._engine, self._logger = engine, logger
        gauge = f"{engine}:kvstored_degraded", "1 while the engine goes on without kvstored."
        counter = f"{engine}:kvstored_failures", "Calls of the store that failed and became misses."
        self._degraded = self._made(client.Gauge, *gauge, multiprocess_mode="livemax")
        self._failures = self._made(client.Counter, *counter)

    def _made(self, kind: Any, name: str, says: str, **options: Any) -> Any:
        try:
            return kind(name, says, **options)
        except (ValueError, OSError) as error:  # a name that is taken, no place to write it
            self._logger.warning("kvstored: there is no figure %s: %s", name, error)
            return None

    def failed(self) -> None:
        if self._failures is not None:
            self._failures.inc()

    def note(self, health: Health, away: bool) -> None:
        """The gauge is 1 as long as anybody of this process is without its store."""
        with self._lock:
            (self._away.add if away else self._away.discard)(health)
            if self._degraded is not None:
                self._degraded.set(int(len(self._away) > 0))


_figures: dict[str, _Figures] = {}  # of this process
_figures_lock = threading.Lock()  # prometheus_client takes a name once


def _figures_of(engine: str, logger: logging.Logger) -> _Figures | None:
    """None: prometheus_client is not there."""
    with _figures_lock:
        if engine not in _figures:
            try:
                import prometheus_client  # the engine's, no dependency of ours
            except ImportError:
                return None
            _figures[engine] = _Figures(engine, prometheus_client, logger)
        return _figures[engine]


class Health:
    """Of one client. To be asked once per step of the engine. Thread-safe."""

    def __init__(self, client: Any, logger: logging.Logger, engine: str = "") -> None:
        """engine: whose figures in prometheus_client say it, too; vLLM's are asked for instead."""
        self._client, self._logger = client, logger
        self._figures = _figures_of(engine, logger) if engine else None
        self._lock = threading.Lock()
        self._failed = False  # since the last look
        self._over = False  # nothing is shared any more
        self._since: float | None = None
        self._since_clock = ""
        self._why = ""
        self.failures_total = 0
        if self._figures is not None:
            self._figures.note(self, False)  # who was away and is no more does not count from now on

    @property
    def away(self) -> bool:
        """Whether the engine goes on without its store."""
        return self._since is not None

    def at_start(self, who: str = "the engine") -> bool:
        """Whether the store is there; if not, one line says why, so that a wrong directory is seen."""
        if self._client.degraded:
            self._logger.warning(
                "kvstored: no daemon at the start (%s); %s runs without a store until there is one",
                self._client.why_degraded, who,
            )  # fmt: skip
        return not self._client.degraded

    def not_tried(self, who: str, why: str) -> None:
        """Says that the self-test of the start has to wait."""
        self._logger.warning(
            "kvstored: the store took no block at the start (%s); %s goes on, and the first block that it "
            "stores is compared", why, who,
        )  # fmt: skip

    def failed(self, what: str, error: BaseException | str) -> None:
        """Counts a failure that became a miss, and says the first of a row."""
        with self._lock:
            self._note(f"{what} failed: {error}")

    def end(self, why: str) -> None:
        """The engine goes on without the store for good."""
        with self._lock:
            self._over, self._since = True, None
            self._note(why)

    def _note(self, why: str) -> None:
        self.failures_total += 1
        self._failed = True
        if self._figures is not None:
            self._figures.failed()
            self._figures.note(self, True)
        if self._since is None:
            self._since, self._why = time.monotonic(), why
            self._since_clock = datetime.now().astimezone().isoformat(timespec="seconds")
            self._logger.warning(
                "kvstored: since %s the engine goes on without the store: %s", self._since_clock, self._why
            )

    def close(self) -> None:
        """Its part of the engine has ended: the gauge is not about it any more. Idempotent."""
        with self._lock:
            if self._figures is not None:
                self._figures.note(self, False)

    def look(self) -> None:
        """Notes, and logs once, when the daemon goes away and when it is back."""
        degraded = self._client.degraded
        if not (degraded or self._failed or self.away):  # as in nearly each step of an engine
            return
        with self._lock:
            if degraded:
                if self._since is None:
                    self._note("the daemon failed: it cannot be reached")
            elif self._since is not None and not self._failed and not self._over:
                away_s = time.monotonic() - self._since
                self._since = None
                if self._figures is not None:
                    self._figures.note(self, False)
                self._logger.warning(
                    "kvstored: the store is back after %.1f s; it was away since %s: %s",
                    away_s, self._since_clock, self._why,
                )  # fmt: skip
            self._failed = False
