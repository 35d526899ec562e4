"""The Markdown table out of a run's JSON. Pure: the README's table is made from the same file.

Invariant: every column that was asked for and could not be measured stands below the table with its reason.
"""

from bench.machine import sentence
from bench.rows import COLUMNS

HEADINGS = {column: column for column in COLUMNS} | {
    "redis": "Redis",
    "lmdb": "LMDB",
    "mooncake": "Mooncake",
    "kvboost": "KVBoost",
}
SHOWN_SERVER_SHARE = 0.05  # below it the server has no part in the operation
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
    if cell.get("note"):
        extras.append(cell["note"])
    return text + (f" ({'; '.join(extras)})" if extras else "")


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
        f"Machine: {sentence(run['machine'])}. `{run['command']}`, {run['started']}, "
        f"{run['rounds']} rounds alternating, medians{', quick' if run['quick'] else ''}.",
        "",
        "| operation | reach | " + " | ".join(HEADINGS[column] for column in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for row in run["rows"]:
        cells = [_cell(row, column, notes, absent) for column in columns]
        lines.append(f"| {row['title']} | {row['reach']} | " + " | ".join(cells) + " |")
    for column in columns:
        if column in absent:
            notes.mark(column, absent[column])
    if notes.reasons:
        lines += ["", "Not measured:", ""] + [f"{i}. {reason}" for i, reason in enumerate(notes.reasons, 1)]
    versions = [text for column, text in run["versions"].items() if column in columns]
    if versions:
        lines += ["", "Versions: " + "; ".join(versions) + "."]
    return "\n".join(lines) + "\n"
