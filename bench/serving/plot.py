"""TTFT against load, as a PNG: tiny prompts of one, eight and thirty-two clients, and the long ones beside.

Owns the picture. matplotlib (dependency group `plots`) draws it; without it the reason is said.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
    ("one, cold", lambda row: row["a"]["cold"]["ttft_s"]),
    ("one, again", lambda row: row["a"]["warm"]["ttft_s"]),
    ("eight share\n1,024 tokens", lambda row: row["b"]["ttft_p99_s"]),
    ("eight share\nnothing", lambda row: row["c"]["ttft_p99_s"]),
]


def plot(out: dict[str, Any], path: Path) -> str:
    """What to print: where it lies, or why it was not drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install matplotlib"
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["contender"] for row in out["rounds"]))
    for index, name in enumerate(names):
        rows, colour = [row for row in out["rounds"] if row["contender"] == name], f"C{index}"
        tiny = [row["d"] for row in rows if "d" in row]
        if tiny:
            beside = sorted(map(int, tiny[0]))
            times = [statistics.median(row[str(n)]["ttft_p50_s"] for row in tiny) for n in beside]
            left.plot(beside, times, marker="o", color=colour)
        right.plot([], [], linewidth=6, color=colour, label=name)
        width = 0.8 / len(names)
        for place, (_, read) in enumerate(LONG):
            if (value := _median(rows, read)) is not None:
                right.bar(place + width * (index + 0.5) - 0.4, value, width, color=colour)
    left.set(xscale="log", yscale="log", xlabel="clients at once", ylabel="time to first token, s (median)")
    left.set_title("tiny prompts", fontsize=9)
    left.set_xticks([1, 8, 32], ["1", "8", "32"])
    right.set(yscale="log", ylabel="time to first token, s (of eight: the last)")
    right.set_xticks(range(len(LONG)), [label for label, _ in LONG], fontsize=8)
    right.set_title("long prompts", fontsize=9)
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
    figure.suptitle(f"{out['model']}, fp32, one thread; {out['machine']['model']}", fontsize=9)
    figure.savefig(path, dpi=110)
    return f"plot: {path}"


def _median(rows: list[dict[str, Any]], read: Callable[[dict[str, Any]], float]) -> float | None:
    values = []
    for row in rows:
        try:
            values.append(read(row))
        except KeyError:  # not asked for
            continue
    return statistics.median(values) if values else None
