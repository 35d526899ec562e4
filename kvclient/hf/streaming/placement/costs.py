"""What a streamed layer costs, measured at start, and so where it is computed: on the device, behind the link
that carries its weights, or on the host, where they lie.

Owns the measurement and the choice. Never moves a weight. Invariant: a choice says for each streamed layer
"host" or "device", and without a host everything is "device"; no choice changes what a layer computes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS = (1, 4, 16)  # measured; more rows cost in proportion
ROUNDS = 5  # of each measurement: the least, for whoever else works on the machine only adds
TURNS = 3  # of a pass over the layers in thought: the last one is the steady state


@dataclass(frozen=True)
class Costs:
    """link: bytes a second. device, host: seconds of a layer by its number of rows; host None: it is not
    asked.
    """

    link: float
    device: Mapping[int, float]
    host: Mapping[int, float] | None = None

    def seconds(self, where: str, rows: int) -> float:
        """Of one layer, of the next number of rows that was measured."""
        table = self.device if where == "device" else self.host
        assert table is not None
        measured = min((count for count in table if count >= rows), default=max(table))
        return table[measured] * max(1.0, rows / measured)

    def choose(self, moved: Mapping[int, int], slots: int, rows: int) -> dict[int, str]:
        """Where each layer ends first, in the order of a pass, again and again (list scheduling: Graham,
        "Bounds on Multiprocessing Timing Anomalies", 1969). moved: bytes of each streamed layer.
        """
        if self.host is None or not moved:
            return dict.fromkeys(moved, "device")
        device, host = self.seconds("device", rows), self.seconds("host", rows)
        now = link = 0.0
        free = deque([0.0] * slots)  # when each slot may be filled again
        found: dict[int, str] = {}
        for _ in range(TURNS):
            for layer, length in moved.items():
                there = max(link, free[0]) + length / self.link
                behind = max(now, there) + device
                if now + host <= behind:
                    found[layer], now = "host", now + host
                else:
                    found[layer], now, link = "device", behind, there
                    free.popleft()
                    free.append(now)
        return found

    def expected_s(self, moved: Sequence[int], layers: int) -> float:
        """Of a pass of one row over all layers on the device: the longer of the link and the products."""
        return max(sum(moved) / self.link, layers * self.seconds("device", 1))

    def report(self) -> dict[str, Any]:
        """What was measured."""
        found: dict[str, Any] = {"link_bytes_per_s": self.link, "device_s": dict(self.device)}
        return found | ({"host_s": dict(self.host)} if self.host is not None else {})


def products_s(layer: torch.nn.Module, threads: int, counts: Sequence[int] = ROWS) -> dict[int, float]:
    """Seconds of the layer's products by number of rows. Its weights must have memory."""
    linears: list[Any] = [m for m in layer.modules() if hasattr(m, "in_features")]
    kind = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    found = {}
    with with_threads(threads), torch.inference_mode():
        for rows in counts:
            inputs = [torch.ones((rows, linear.in_features), dtype=kind) for linear in linears]
            found[rows] = _least_s(linears, inputs)
    return found


@contextlib.contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """torch's number of threads, of the calling thread, for as long as the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _least_s(linears: Sequence[Any], inputs: Sequence[torch.Tensor]) -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for linear, x in zip(linears, inputs, strict=True):
            linear(x)
        took.append(time.perf_counter() - began)
    return min(took)
