"""Which streamed layers of a pass are computed on the host, by its number of rows.

Owns the choices that were made, and which of them the scheduler reads ahead for. Never computes a layer.
Invariant: a layer that is computed on the host is not read ahead while passes of that many rows follow each
other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvclient.hf.streaming.placement.costs import Costs
from kvclient.hf.streaming.scheduler import Scheduler


class Placement:
    """moved: bytes of each streamed layer; behind: what a pass asks the scheduler for after them."""

    def __init__(
        self, costs: Costs, moved: Mapping[int, int], behind: Sequence[int], scheduler: Scheduler
    ) -> None:
        self._costs, self._moved, self._behind, self._scheduler = costs, dict(moved), tuple(behind), scheduler
        self._choices: dict[int, dict[int, str]] = {}
        self._follows: dict[int, str] = dict.fromkeys(moved, "device")
        self._lock = threading.Lock()
        self.on_host = 0  # layers computed there so far

    def choice(self, rows: int) -> dict[int, str]:
        """Of each streamed layer "host" or "device"; the same for each pass of so many rows."""
        if rows not in self._choices:
            self._choices[rows] = self._costs.choose(self._moved, len(self._scheduler.slots), rows)
        return self._choices[rows]

    def enter(self, layer: int, rows: int) -> bool:
        """Whether the host computes the layer, which is asked for now."""
        with self._lock:
            chosen = self.choice(rows)
            if chosen != self._follows:
                self._follows = chosen
                read = [number for number, where in chosen.items() if where == "device"]
                self._scheduler.follow([*read, *self._behind])
            return chosen[layer] == "host"

    def counted(self) -> None:
        """The host computes one layer more."""
        with self._lock:
            self.on_host += 1

    def report(self) -> dict[str, Any]:
        """By rows, how many layers each computes; what was measured."""
        with self._lock:
            found = {rows: dict(Counter(chosen.values())) for rows, chosen in self._choices.items()}
            return {**self._costs.report(), "computed_on_host": self.on_host, "chosen": found}
