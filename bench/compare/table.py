"""The Markdown table out of a run's JSON. Pure: the README's table is made from the same file.

Invariant: every column that was asked for and could not be measured stands below the table with its reason.
"""

from bench.compare.figures import LEAST_SHARE
from bench.compare.rows import COLUMNS
from bench.machine import sentence

HEADINGS = {column: column for column in COLUMNS} | {
    "redis": "Redis",
    "lmdb": "LMDB",
    "mooncake": "Mooncake",
    "kvboost": "KVBoost",
    "lmcache": "LMCache",
}
SHOWN_SERVER_SHARE = 0.05  # below it the server has no part in the operation
LESS_IS_MORE = ("us", "ms", "MB", "%", "B")
UNITS = {"us": "µs", "x": "×"}


def number(value: float) -> str:
    """Three significant digits, thousands apart: 0.71, 12.5, 1,140."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if round(abs(value), 2) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.2f}"


def cell_text(cell: dict) -> str:
    """One measurement: `copy_into: 15.1 GB/s = 1.21 × memcpy (28 µs beside the copy)`."""
    head = f"{cell['variant']}: " if cell.get("variant") else ""
    text = f"{head}{number(cell['value'])} {UNITS.get(cell['unit'], cell['unit'])}"
    if cell.get("ratio") is not None:
        text += f" = {cell['ratio']:.2f} × {cell['ratio_of']}"
    extras = []
    if cell.get("p99") is not None:
        extras.append(f"p99 {number(cell['p99'])}")
    if cell.get("overhead_us") is not None:
        extras.append(f"{number(cell['overhead_us'])} µs beside the copy")
    if cell["unit"] == "us" and cell.get("server_cpu_us", 0) > SHOWN_SERVER_SHARE * cell["value"]:
        extras.append(f"{number(cell['server_cpu_us'])} µs of the server's CPU")
    if cell.get("fairness") is not None:
        extras.append(f"slowest {cell['fairness']:.2f} × fastest")
    if cell.get("quiet") is not None:
        extras.append(_noise(cell))
    if cell.get("note"):
        extras.append(cell["note"])
    return text + (f" ({'; '.join(extras)})" if extras else "")


def _noise(cell: dict) -> str:
    """How much of it the quiet calls are, whose figure it is, and what all calls come to."""
    if cell["of_all"] == cell["value"] and cell["quiet"] < LEAST_SHARE:
        return "hardly ever quiet"
    return f"{cell['quiet']:.0%} quiet, all: {number(cell['of_all'])}"


class _Notes:
    """Reasons for empty cells, numbered in order of appearance, equal ones once."""

    def __init__(self):
        self.reasons: list[str] = []

    def mark(self, column: str, reason: str) -> str:
        text = f"{HEADINGS[column]}: {reason}"
        if text not in self.reasons:
            self.reasons.append(text)
        return f"— [{self.reasons.index(text) + 1}]"


def _cell(row: dict, column: str, notes: _Notes, absent: dict[str, str]) -> str:
    parts = []
    for cell in row["cells"]:
        if cell["column"] != column:
            continue
        if "absent" in cell:
            mark = notes.mark(column, cell["absent"])
            parts.append(f"{cell['variant']}: {mark}" if cell.get("variant") else mark)
        else:
            parts.append(cell_text(cell))
    if not parts and column in absent:
        parts.append(notes.mark(column, absent[column]))
    return "<br>".join(parts)


def markdown(run: dict) -> str:
    """The whole table of a run, the machine and the command above it, the reasons below it."""
    notes, absent = _Notes(), {entry["column"]: entry["reason"] for entry in run["absent"]}
    shown = {cell["column"] for row in run["rows"] for cell in row["cells"]} | set(absent)
    columns = [column for column in COLUMNS if column in shown]
    lines = [
        *_above(run),
        "| operation | reach | " + " | ".join(HEADINGS[column] for column in columns) + " |",
    ]
    lines.append("|---" * (len(columns) + 2) + "|")
    for row in run["rows"]:
        cells = [_cell(row, column, notes, absent) for column in columns]
        lines.append(f"| {row['title']} | {row['reach']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_below(run, columns, notes, absent)]) + "\n"


def compact(run: dict) -> str:
    """The same for a page with little room: medians and ratios, all peers in one cell, the fastest first."""
    notes, absent = _Notes(), {entry["column"]: entry["reason"] for entry in run["absent"]}
    columns = [c for c in COLUMNS if any(cell["column"] == c for row in run["rows"] for cell in row["cells"])]
    peers = [column for column in [*columns, *absent] if column not in ("kvstored", "limit")]
    lines = [*_above(run), "| operation | reach | kvstored | limit | peers |", "|---" * 5 + "|"]
    for row in run["rows"]:
        bare = {**row, "cells": [_bare(cell) for cell in row["cells"]]}
        texts = [_cell(bare, column, notes, absent) for column in ("kvstored", "limit")]
        found = [cell for cell in bare["cells"] if cell["column"] in peers and "value" in cell]
        found.sort(key=lambda cell: cell["value"] if cell["unit"] in LESS_IS_MORE else -cell["value"])
        best = [f"{HEADINGS[cell['column']]} {cell_text(cell)}" for cell in found]
        missing = {cell["column"]: cell["absent"] for cell in row["cells"] if "absent" in cell}
        best += [
            f"{HEADINGS[column]} {notes.mark(column, reason)}"
            for column, reason in missing.items()
            if column in peers
        ]
        lines.append(f"| {row['title']} | {row['reach']} | {texts[0]} | {texts[1]} | {'<br>'.join(best)} |")
    return "\n".join([*lines, *_below(run, [*columns, *absent], notes, absent)]) + "\n"


def _bare(cell: dict) -> dict:
    """A cell without its extras; what lies beside a copy stays, because it has a reach of its own."""
    return {key: value for key, value in cell.items() if key not in ("p99", "server_cpu_us")} | (
        {"note": ""} if cell["column"] in ("kvstored", "limit") and cell.get("unit") != "x" else {}
    )


def _above(run: dict) -> list[str]:
    return [
        f"Machine: {sentence(run['machine'])}. `{run['command']}`, {run['started']}, "
        f"{run['rounds']} rounds alternating, medians{', quick' if run['quick'] else ''}.{_pace(run)}",
        "",
    ]


def _pace(run: dict) -> str:
    if "pace_us" not in run:
        return ""
    return (
        " *Quiet* are the calls beside which a fixed loop ran within a third of its best pace"
        f" ({run['pace_us']} µs) on the client's processor; where there were enough, the figures are theirs."
    )


def _below(run: dict, columns: list[str], notes: _Notes, absent: dict[str, str]) -> list[str]:
    """Why cells are empty, and the versions."""
    for column in columns:
        if column in absent:
            notes.mark(column, absent[column])
    lines = []
    if notes.reasons:
        lines += ["", "Not measured:", ""] + [f"{i}. {reason}" for i, reason in enumerate(notes.reasons, 1)]
    versions = [text for column, text in run["versions"].items() if column in columns]
    return lines + (["", "Versions: " + "; ".join(versions) + "."] if versions else [])
