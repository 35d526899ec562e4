"""What was measured, as a table of medians over the rounds.

Owns the rows. Never measures. What is not there is said below it, with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

CLIENTS = ("1", "8", "32")
ROWS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("a cold TTFT s", lambda r: r["a"]["cold"]["ttft_s"], ".2f"),
    ("a warm TTFT s", lambda r: r["a"]["warm"]["ttft_s"], ".3f"),
    ("a warm / cold", lambda r: r["a"]["warm_over_cold"], ".3f"),
    ("a warm / cold, CPU s to the first token", lambda r: r["a"]["warm_over_cold_cpu"], ".3f"),
    ("a between tokens ms", lambda r: 1000 * r["a"]["warm"]["itl_s"], ".0f"),
    ("a cold CPU s", lambda r: r["a"]["cold"]["cpu_s"], ".1f"),
    ("b TTFT p99 / a cold", lambda r: r["b"]["ttft_p99_s"] / r["a"]["cold"]["ttft_s"], ".2f"),
    ("b tokens/s", lambda r: r["b"]["tokens_per_s"], ".1f"),
    ("b CPU s", lambda r: r["b"]["cpu_s"], ".1f"),
    ("c TTFT p99 s", lambda r: r["c"]["ttft_p99_s"], ".1f"),
    ("c tokens/s", lambda r: r["c"]["tokens_per_s"], ".1f"),
    ("c CPU s", lambda r: r["c"]["cpu_s"], ".1f"),
    *[(f"d {n} at once: requests/s", lambda r, n=n: r["d"][n]["requests_per_s"], ".1f") for n in CLIENTS],
    ("d 8 at once: CPU ms a request", lambda r: r["d"]["8"]["cpu_ms"], ".0f"),
    ("PSS MiB before the loads", lambda r: r["pss_before_loads_mib"], ".0f"),
    ("PSS MiB behind them", lambda r: r["pss_mib"], ".0f"),
    ("PSS MiB three seconds later", lambda r: r["pss_at_rest_mib"], ".0f"),
    ("of it the pool", lambda r: r["pool_mib"], ".0f"),
    ("start s", lambda r: r["start_s"], ".1f"),
]


def table(out: dict[str, Any]) -> str:
    names = list(dict.fromkeys(row["contender"] for row in out["rounds"]))
    there = {name: [r for r in out["rounds"] if r["contender"] == name] for name in names}
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"] if names else []
    for label, read, form in ROWS:
        cells = [_cell(there[name], read, form) for name in names]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for row in out["rounds"]:
        if "not_there" in row:
            lines.append(f"{row['contender']}, round {row['round']}: {row['not_there']}")
    for name, told in out["own"].items():
        lines.append(f"{name}: {_rounded(told)}")
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]], read: Callable[[dict[str, Any]], Any], form: str) -> str:
    values = []
    for row in rows:
        try:
            values.append(read(row))
        except (KeyError, TypeError):  # not asked for, or a figure that a server does not give
            continue
    return format(statistics.median(values), form) if values else "–"


def _rounded(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _rounded(value) for name, value in told.items()}
    return round(told, 3) if isinstance(told, float) else told
