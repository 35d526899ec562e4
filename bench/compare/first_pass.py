"""The rows of a client that has just attached: each a process of its own, started and ended here."""

from statistics import median

from bench.compare.contenders import Contenders
from bench.compare.driver import DriverFailed
from bench.compare.figures import absent_cell
from bench.compare.rows import Row
from bench.install import progress

ANSWER_TIMEOUT_S = 90.0
UNMAPPED = dict.fromkeys(("redis", "mooncake"), "clients do not map its memory")


def run_first_pass(row: Row, up: Contenders, rounds: int) -> list[dict]:
    """Each round a process attaches anew and goes over the memory twice; the ratio of its two passes."""
    calls, results, absent = row.params["blocks"], {}, {}
    columns = [column for column in up.columns if column != "limit"]
    contenders = [
        (column, variant, method or row.method)
        for column in columns
        for variant, method in (row.ours if column == "kvstored" else (("", ""),))
    ]
    for column in columns:
        absent[column] = up.absent.get(column) or UNMAPPED.get(column) or _make_room(row, up, column)
    for number in range(rounds):
        for column, variant, method in contenders:
            if absent[column]:
                continue
            try:
                with up.alone(column):
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
    first, second = (round(median(figures[which] for figures in found), 2) for which in ("first", "second"))
    return {
        "column": column,
        "variant": variant,
        "unit": "x",
        "value": round(median(figures["first"] / figures["second"] for figures in found), 2),
        "rounds": [round(figures["first"] / figures["second"], 2) for figures in found],
        "note": f"{first} / {second} GB/s" + (f", {found[-1]['note']}" if found[-1]["note"] else ""),
    }
