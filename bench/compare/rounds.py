"""Alternation: A B C, A B C, … within one run, so that a machine that drifts, drifts for all.

Knows nothing of what is measured. The number of calls follows from a time budget, found by a short trial.
"""

from functools import partial

from bench.compare.contenders import Contenders
from bench.compare.driver import DriverFailed
from bench.compare.figures import absent_cell, add_ratios, cell_of, enough_quiet
from bench.compare.rows import LIMITS, Row
from bench.install import progress
from bench.pace import Yardstick

RUN_TIMEOUT_S = 90.0
TRIAL_CALLS = 8
LEAST_CALLS = 5
MOST_ROUNDS = 3  # times those asked for, where a contender has had too few quiet calls


def entries(row: Row, up: Contenders) -> list[tuple[str, str, str, str]]:
    """(column, variant, driver's variant, method) for everyone who takes part in this row."""
    found = []
    for column in up.columns:
        if column == "kvstored":
            found += [(column, variant, "", method or row.method) for variant, method in row.ours]
        elif column == "limit":
            if row.session == "bulk":
                found += [(column, variant, variant, row.method) for variant in LIMITS]
        else:
            found.append((column, "", "", row.method))
    return found


class _Entry:
    """One contender in one row: prepared, tried, then run once per round."""

    def __init__(self, row: Row, up: Contenders, entry: tuple[str, str, str, str], budget_s: float):
        self.column, self.variant, driven, method = entry
        self.alone = partial(up.alone, self.column, driven)
        self.op = f"{row.id}.{self.variant}"
        self.results: list[dict] = []
        self.absent = up.absent.get(driven or self.column) or up.absent.get(self.column, "")
        self.driver = up.drivers.get((self.column, driven))
        if not self.absent:
            self._guard(lambda: self._prepare(row, method, budget_s))

    def _guard(self, step) -> None:
        try:
            step()
        except DriverFailed as failure:
            self.absent = str(failure)
            progress(f"{self.column} {self.variant}: {failure}")

    def _ask(self, n: int) -> dict:
        return self.driver.ask(RUN_TIMEOUT_S, call="run", op=self.op, n=n)

    def _prepare(self, row: Row, method: str, budget_s: float) -> None:
        answer = self.driver.ask(RUN_TIMEOUT_S, call="prepare", op=self.op, method=method, params=row.params)
        self.absent = answer.get("absent", "")
        if self.absent:
            return
        if (
            "cycle_bytes" in row.params
        ):  # every destination once, so that no page is touched for the first time
            self._ask(row.params["cycle_bytes"] // (row.params["bytes"] * row.params["batch"]))
        trial = self._ask(TRIAL_CALLS)
        typical = sorted(trial["ns"])[TRIAL_CALLS // 2] / 1e9
        self.calls = max(LEAST_CALLS, min(row.most, int(budget_s / typical)))

    def round(self) -> None:
        if not self.absent:
            with self.alone():
                self._guard(lambda: self.results.append(self._ask(self.calls)))

    def paces(self) -> list[int]:
        return self.results[-1]["pace_ns"] if self.results else []

    def had_quiet(self, yardstick: Yardstick) -> bool:
        return not self.results or enough_quiet(self.results, yardstick.quiet)

    def cell(self, bytes_per_call: int, yardstick: Yardstick) -> dict:
        if self.absent or not self.results:
            return absent_cell(self.column, self.variant, self.absent or "not run")
        return cell_of(self.column, self.variant, self.results, bytes_per_call, yardstick.quiet)


def run_row(row: Row, up: Contenders, rounds: int, budget_s: float, yardstick: Yardstick) -> list[dict]:
    """All contenders of one row, alternating; their cells."""
    taking_part = [_Entry(row, up, entry, budget_s) for entry in entries(row, up)]
    for number in range(MOST_ROUNDS * rounds):
        for entry in taking_part:
            entry.round()
            yardstick.seen(entry.paces())
        if number + 1 >= rounds and all(entry.had_quiet(yardstick) for entry in taking_part):
            break
    bytes_per_call = row.params.get("bytes", 0) * row.params.get("batch", 1)
    cells = [entry.cell(bytes_per_call, yardstick) for entry in taking_part]
    limit = next((cell for cell in cells if cell["variant"] == LIMITS[0] and "rounds" in cell), None)
    add_ratios(cells, limit, LIMITS[0])
    return cells
