"""TTFT against load, as a PNG: one, eight and thirty-two clients with tiny prompts, and eight long ones.

Owns the picture. matplotlib (dependency group `plots`) draws it; without it the reason is said.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any


def plot(out: dict[str, Any], path: Path) -> str:
    """What to print: where it lies, or why it was not drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install matplotlib"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["contender"] for row in out["rounds"]))
    for name in names:
        rows = [row for row in out["rounds"] if row["contender"] == name and "d" in row]
        if not rows:
            continue
        beside = [int(n) for n in rows[0]["d"]]
        times = [statistics.median(row["d"][str(n)]["ttft_p50_s"] for row in rows) for n in beside]
        axes.plot(beside, times, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="clients at once", ylabel="time to first token, s (median)")
    axes.set_title(f"{out['model']}, tiny prompts; {out['machine']['model']}", fontsize=9)
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return f"plot: {path}"
