"""How many of the layers that lie in the host's memory the host computes beside a device, by the rows of a
pass.

Owns the arithmetic. Never measures, never computes a layer. Invariant: a pass of more rows than were measured
is the device's, and the host gets no layer whose words it has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvclient.hf.streaming.device.plan import spread
from kvclient.hf.streaming.placement.costs import ROWS, Costs

MOST_ROWS = max(ROWS)


@dataclass(frozen=True)
class Shares(Costs):
    """device, host: seconds of a whole layer, attention and the way to the host and back included. layers: of
    the model; able: those of which the host has the words in its order.
    """

    layers: int = 0
    able: tuple[int, ...] = ()

    def pass_s(self, moved: Mapping[int, int], rows: int, on_host: int) -> float:
        """Of a pass of which the host computes so many layers: the link brings the others meanwhile. moved:
        bytes of each layer that lies in the host's memory.
        """
        brought = sum(moved.values()) / self.link * (1 - on_host / len(moved))
        here = on_host * self.seconds("host", rows) if on_host else 0.0
        return max(brought, here + (self.layers - on_host) * self.seconds("device", rows))

    def on_host(self, moved: Mapping[int, int], rows: int, most: int) -> int:
        """The number of layers, `most` or fewer, with which a pass ends first; of equals the least."""
        if rows > MOST_ROWS or self.host is None or not moved:
            return 0
        return min(range(most + 1), key=lambda count: self.pass_s(moved, rows, count))

    def choose(self, moved: Mapping[int, int], slots: int, rows: int) -> dict[int, str]:
        """At even distances, so that the link brings one while another is computed."""
        chosen = spread(len(self.able), self.on_host(moved, rows, len(self.able)))
        on_host = {number for number, picked in zip(self.able, chosen, strict=True) if picked}
        return {number: "host" if number in on_host else "device" for number in moved}

    def report(self) -> dict[str, Any]:
        """What was measured, and how many layers the host has."""
        return {**super().report(), "host_has": len(self.able)}
