"""How the GPU benchmarks take time: device events around replays of a CUDA graph, contenders alternating.

Owns the clock and the name of the device. Never judges. Invariant: every number is the median over rounds in
which each contender had its turn; a contender whose inputs would fit in the L2 cache has several sets of them
and takes turns among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

DEVICE = "cuda"
ROUNDS = 9
ROUND_MS = 15.0  # of one contender's turn
MOST_CALLS = 100  # in one graph
CACHED_BYTES = 256 << 20  # inputs of one call and its sets together are more than this: several times the L2

Calls = Sequence[Callable[[], object]]


class Timer:
    """One contender: its calls, one after the other, as a graph if they can be captured."""

    def __init__(self, calls: Calls) -> None:
        self._calls = list(calls)
        for call in [*self._calls, *self._calls]:  # the first of a kind loads code and makes handles
            call()
        torch.cuda.synchronize()
        once_ms = self._eager_ms(len(self._calls)) / len(self._calls)
        self.count = max(len(self._calls), min(MOST_CALLS, int(ROUND_MS / max(once_ms, 1e-3)) + 1))
        self._graph = self._captured()

    def round_us(self) -> float:
        """Of one call."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._go(self.count)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.count

    def _go(self, count: int) -> None:
        for index in range(count):
            self._calls[index % len(self._calls)]()

    def _eager_ms(self, count: int) -> float:
        began = time.perf_counter()
        self._go(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._go(self.count)
        except RuntimeError:  # what cannot be captured is timed as it is called
            torch.cuda.synchronize()
            return None
        graph.replay()
        torch.cuda.synchronize()
        return graph


def timed(contenders: dict[str, Calls]) -> dict[str, float]:
    """Microseconds of one call of each, medians."""
    timers = {name: Timer(calls) for name, calls in contenders.items()}
    rounds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            rounds[name].append(timer.round_us())
    return {name: median(values) for name, values in rounds.items()}


def walled(contenders: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """The same by the host's clock, from the call until the device is idle: where the host takes part."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):  # the first is to warm up
        for name, call in contenders.items():
            settle()
            began = time.perf_counter()
            call()
            settle()
            times[name].append((time.perf_counter() - began) * 1e6)
    return {name: median(values[1:]) for name, values in times.items()}


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def own_stream() -> int:
    return torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0


def pinned_bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=DEVICE == "cuda")


def sets_for(bytes_each: int) -> int:
    """How many sets of inputs of this size keep the L2 cache out of it."""
    return max(1, -(-CACHED_BYTES // max(1, bytes_each)))


def ceilings() -> dict[str, float]:
    """What this device does at best: bytes and operations per second, measured now."""
    words = torch.randn(1 << 29, device=DEVICE)  # 2 GiB
    target = torch.empty_like(words)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    took = timed(
        {
            "sum": [lambda: words.sum()],
            "amax": [lambda: words.amax()],
            "copy": [lambda: target.copy_(words)],
            "gemm": [lambda: torch.mm(a, b, out=c)],
        }
    )
    pinned = pinned_bytes(1 << 30).random_(0, 256)
    arrived = target.view(torch.uint8)[: pinned.numel()]
    sent = walled({"h2d": lambda: arrived.copy_(pinned, non_blocking=True)})["h2d"]
    count = words.numel() * 4
    return {
        "read_bytes_s": count / min(took["sum"], took["amax"]) * 1e6,
        "copy_bytes_s": 2 * count / took["copy"] * 1e6,
        "gemm_flop_s": 2 * 8192**3 / took["gemm"] * 1e6,
        "pinned_bytes_s": pinned.numel() / sent * 1e6,
    }
