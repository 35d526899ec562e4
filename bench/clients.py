"""Rows that need further client processes: several readers at once, and a client that has just attached.

The clients belong to a running contender; each is a process of its own, started and ended here.
"""

import time
from contextlib import ExitStack
from statistics import median

from bench.contenders import Contenders
from bench.driver import DriverFailed
from bench.figures import absent_cell
from bench.install import progress
from bench.pace import Yardstick, pace_ns
from bench.rows import Row

START_BARRIER_S = 0.05
READING_S = 0.25
SETTLED_S = 0.005
LEAST_QUIET_READINGS = 3
ANSWER_TIMEOUT_S = 90.0
WHY_NOT = {
    "redis": {"first_pass": "clients do not map its memory"},
    "mooncake": {"first_pass": "clients do not map its memory"},
}


def _columns(row: Row, up: Contenders) -> list[str]:
    return [column for column in up.columns if column != "limit"]


def _missing(row: Row, up: Contenders, column: str) -> str:
    return up.absent.get(column, "") or WHY_NOT.get(column, {}).get(row.session, "")


def run_readers(row: Row, up: Contenders, rounds: int, yardstick: Yardstick) -> list[dict]:
    """`clients` processes get and release for a while, from the same moment; contenders alternate."""
    cells, ready, count = [], {}, row.params["clients"]
    with ExitStack() as stack:
        for column in _columns(row, up):
            reason = _missing(row, up, column)
            try:
                if not reason:
                    ready[column] = [_reader(stack, row, up, column, number) for number in range(count)]
            except DriverFailed as failure:
                reason = f"{count} clients: {failure}"
            if reason:
                progress(f"{column}: {reason}")
                cells.append(absent_cell(column, "", reason))
        results: dict[str, list[tuple[list[dict], int]]] = {column: [] for column in ready}
        for _ in range(rounds):
            for column in list(ready):
                try:
                    with up.alone(column):
                        results[column].append(_at_once(ready[column], row.id))
                except DriverFailed as failure:
                    cells.append(absent_cell(column, "", str(failure)))
                    del ready[column], results[column]
    yardstick.seen([pace for rounds_of in results.values() for _, pace in rounds_of])
    cells += [
        _reader_cell(column, rounds_of, yardstick) for column, rounds_of in results.items() if rounds_of
    ]
    order = _columns(row, up)
    return sorted(cells, key=lambda cell: order.index(cell["column"]))


def _reader(stack: ExitStack, row: Row, up: Contenders, column: str, number: int):
    driver = up.launch(column, f"{row.id}-{column}-{number}", up.client_parameters(column))
    stack.callback(driver.close)
    driver.ask(ANSWER_TIMEOUT_S, call="prepare", op=row.id, method=row.method, params=row.params)
    return driver


def _at_once(drivers: list, op: str) -> tuple[list[dict], int]:
    """What each reader did, and the slower of the paces before and after."""
    before = pace_ns()
    start_ns = time.monotonic_ns() + int(START_BARRIER_S * 1e9)
    for driver in drivers:
        driver.send(call="count", op=op, start_ns=start_ns, duration_s=READING_S)
    done = [driver.answer(ANSWER_TIMEOUT_S) for driver in drivers]
    time.sleep(SETTLED_S)  # until the readers sleep: the pace is the machine's, not what they left running
    return done, max(before, pace_ns())


def _reader_cell(column: str, rounds_of: list[tuple[list[dict], int]], yardstick: Yardstick) -> dict:
    rates = [[one["done"] / one["seconds"] for one in clients] for clients, _ in rounds_of]
    quiet = [rate for rate, (_, pace) in zip(rates, rounds_of, strict=True) if yardstick.quiet(pace)]
    chosen = quiet if len(quiet) >= LEAST_QUIET_READINGS else rates
    totals = [round(sum(one)) for one in chosen]
    return {
        "column": column,
        "variant": "",
        "unit": "/s",
        "value": median(totals),
        "of_all": round(median(sum(one) for one in rates)),
        "quiet": round(len(quiet) / len(rates), 3),
        "rounds": totals,
        "fairness": round(median(min(one) / max(one) for one in chosen), 2) if len(rates[0]) > 1 else None,
        "note": rounds_of[-1][0][0].get("note", ""),
    }


def add_scaling(rows: list[dict]) -> None:
    """What n clients reach together, as a multiple of one client of the same contender."""
    one = next((row for row in rows if row["id"] == "readers1"), None)
    if one is None:
        return
    alone = {cell["column"]: cell for cell in one["cells"] if "value" in cell}
    for row in rows:
        if row["id"].startswith("readers") and row is not one:
            for cell in row["cells"]:
                if "value" in cell and cell["column"] in alone:
                    cell["ratio"] = round(cell["value"] / alone[cell["column"]]["value"], 2)
                    cell["ratio_of"] = "one client"


def run_first_pass(row: Row, up: Contenders, rounds: int) -> list[dict]:
    """Each round a process attaches anew and goes over the memory twice; the ratio of its two passes."""
    calls, results, absent = row.params["blocks"], {}, {}
    contenders = [
        (column, variant, method or row.method)
        for column in _columns(row, up)
        for variant, method in (row.ours if column == "kvstored" else (("", ""),))
    ]
    for column in _columns(row, up):
        absent[column] = _missing(row, up, column) or _make_room(row, up, column)
    for number in range(rounds):
        for column, variant, method in contenders:
            if absent[column]:
                continue
            try:
                passes = _two_passes(row, up, column, method, f"{number}{variant[:3]}", calls)
                results.setdefault((column, variant), []).append(passes)
            except DriverFailed as failure:
                absent[column] = str(failure)
                progress(f"{column}: {failure}")
    return [
        _pass_cell(column, variant, results.get((column, variant), []), absent[column])
        for column, variant, _ in contenders
    ]


def _make_room(row: Row, up: Contenders, column: str) -> str:
    """What the new clients find: blocks to read, or (preparing `put` drops what was there) room to write."""
    method = "publish" if row.method == "pass" else row.ours[0][1] if column == "kvstored" else row.method
    try:
        driver = up.drivers[column, ""]
        answer = driver.ask(ANSWER_TIMEOUT_S, call="prepare", op="room", method=method, params=row.params)
        if "absent" not in answer and row.method == "pass":
            driver.ask(ANSWER_TIMEOUT_S, call="run", op="room", n=row.params["blocks"])
        return answer.get("absent", "")
    except DriverFailed as failure:
        return str(failure)


def _two_passes(row: Row, up: Contenders, column: str, method: str, number: str, calls: int) -> dict:
    driver = up.launch(column, f"{row.id}-{column}-{number}", up.client_parameters(column))
    try:
        answer = driver.ask(ANSWER_TIMEOUT_S, call="prepare", op=row.id, method=method, params=row.params)
        if "absent" in answer:
            raise DriverFailed(answer["absent"])
        passes = [driver.ask(ANSWER_TIMEOUT_S, call="run", op=row.id, n=calls)["ns"] for _ in range(2)]
    finally:
        driver.close()
    first, second = (row.params["bytes"] * calls / sum(ns) for ns in passes)
    return {"first": first, "second": second, "note": answer.get("note", "")}


def _pass_cell(column: str, variant: str, found: list[dict], reason: str) -> dict:
    if not found:
        return absent_cell(column, variant, reason or "not run")
    first, second = (round(median(one[which] for one in found), 2) for which in ("first", "second"))
    return {
        "column": column,
        "variant": variant,
        "unit": "x",
        "value": round(median(one["first"] / one["second"] for one in found), 2),
        "rounds": [round(one["first"] / one["second"], 2) for one in found],
        "note": f"{first} / {second} GB/s" + (f", {found[-1]['note']}" if found[-1]["note"] else ""),
    }
