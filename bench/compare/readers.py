"""The rows of several readers at once: processes that get and release for a while, from the same moment.

The clients belong to a running contender; each is a process of its own, started and ended here. Every round
has a window of each number of clients for each contender, so that `× one client` compares neighbours.
"""

import time
from contextlib import ExitStack
from itertools import product
from statistics import median

from bench.compare.contenders import Contenders
from bench.compare.driver import DriverFailed
from bench.compare.figures import absent_cell
from bench.compare.rows import Row
from bench.install import progress

START_BARRIER_S = 0.05
# Long enough that every reader meets the machine's good and bad moments and the system's turns even out:
# within minutes the slowest of eight read 0.71 of the fastest's over 0.25 s, 0.76 over 1 s, 0.79 over 2 s.
READING_S = 2.0
QUICK_READING_S = 0.5
ANSWER_TIMEOUT_S = 90.0


def run_readers(rows: list[Row], up: Contenders, rounds: int, quick: bool) -> dict[str, list[dict]]:
    """The cells of each of these rows, by its id."""
    reading_s = QUICK_READING_S if quick else READING_S
    most = max(rows, key=lambda row: row.params["clients"])
    windows: dict[tuple[str, str], list[list[dict]]] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        ready = {}
        for column in _columns(up):
            absent[column] = up.absent.get(column, "")
            try:
                if not absent[column]:
                    ready[column] = [
                        _reader(stack, most, up, column, k) for k in range(most.params["clients"])
                    ]
            except DriverFailed as failure:
                absent[column] = str(failure)
                progress(f"{column}: {failure}")
        for _ in range(rounds):
            for column, drivers in ready.items():
                for row in rows:
                    if not absent[column]:
                        try:
                            with up.alone(column):
                                done = _at_once(drivers[: row.params["clients"]], most.id, reading_s)
                            windows.setdefault((row.id, column), []).append(done)
                        except DriverFailed as failure:
                            absent[column] = str(failure)
    alone = next((row.id for row in rows if row.params["clients"] == 1), "")
    cells: dict[str, list[dict]] = {row.id: [] for row in rows}
    for row, column in product(cells, _columns(up)):
        if absent[column]:
            cells[row].append(absent_cell(column, "", absent[column]))
        else:
            of_one = windows.get((alone, column)) if row != alone else None
            cells[row].append(_cell(column, windows[row, column], of_one))
    return cells


def _columns(up: Contenders) -> list[str]:
    return [column for column in up.columns if column != "limit"]


def _reader(stack: ExitStack, row: Row, up: Contenders, column: str, number: int):
    driver = up.launch(column, f"{row.id}-{column}-{number}", up.client_parameters(column))
    stack.callback(driver.close)
    driver.ask(ANSWER_TIMEOUT_S, call="prepare", op=row.id, method=row.method, params=row.params)
    return driver


def _at_once(drivers: list, op: str, reading_s: float) -> list[dict]:
    start_ns = time.monotonic_ns() + int(START_BARRIER_S * 1e9)
    for driver in drivers:
        driver.send(call="count", op=op, start_ns=start_ns, duration_s=reading_s)
    return [driver.answer(ANSWER_TIMEOUT_S) for driver in drivers]


def _rates(window: list[dict]) -> list[float]:
    return [reader["done"] / reader["seconds"] for reader in window]


def _cell(column: str, windows: list[list[dict]], of_one: list[list[dict]] | None) -> dict:
    rates = [_rates(window) for window in windows]
    cell = {
        "column": column,
        "variant": "",
        "unit": "/s",
        "value": round(median(sum(readers) for readers in rates)),
        "rounds": [round(sum(readers)) for readers in rates],
        "note": windows[-1][0].get("note", ""),
    }
    if len(windows[0]) > 1:
        cell["fairness"] = round(median(min(readers) / max(readers) for readers in rates), 2)
    if of_one is not None:
        cell["ratio"] = round(
            median(sum(many) / sum(_rates(alone)) for many, alone in zip(rates, of_one, strict=True)), 2
        )
        cell["ratio_of"] = "one client"
    return cell
