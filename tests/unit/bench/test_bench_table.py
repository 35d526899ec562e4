"""Goal: the bench's table says what its figures say: unit, column, ratios taken round by round, and every
contender that could not be measured named with its reason.

Method: a run's JSON as a fixture in this file, its Markdown read back cell by cell; figures from given times.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import replaced
from bench.compare.figures import absent_cell, add_ratios, cell_of, percentile
from bench.compare.table import compact, markdown, number
from bench.pace import Yardstick, pace_ns
from bench.peers import contract

ROOT = Path(__file__).resolve().parents[3]
RUN = {
    "format": 1,
    "command": "python -m bench",
    "quick": False,
    "started": "2026-01-02 03:04 UTC",
    "rounds": 3,
    "machine": {"model": "A CPU", "cores": 2, "memory_gib": 23.5, "kernel": "6.1", "glibc": "glibc 2.36",
                "python": "3.11.7", "load_1m": 0.1},
    "versions": {"redis": "redis 7.0.15", "limit": "glibc 2.36"},
    "absent": [{"column": "mooncake", "reason": "not installed: no such wheel"}],
    "rows": [
        {"id": "lookup64", "title": "look-up", "reach": "≤ 3.5 µs", "cells": [
            {"column": "kvstored", "variant": "", "unit": "us", "value": 2.134, "p99": 3.0,
             "server_cpu_us": 0.01, "note": "500,000 resident"},
            {"column": "redis", "variant": "", "unit": "us", "value": 1140.2, "p99": None,
             "server_cpu_us": 700.4, "note": ""},
            {"column": "vineyard", "variant": "", "absent": "did not start: no socket"}]},
        {"id": "put1m", "title": "put", "reach": "≥ 1 ×", "cells": [
            {"column": "kvstored", "variant": "NumPy fill", "unit": "GB/s", "value": 9.5, "ratio": 0.8,
             "ratio_of": "memcpy"},
            {"column": "kvstored", "variant": "copy_into", "unit": "GB/s", "value": 15.1, "ratio": 1.21,
             "ratio_of": "memcpy", "overhead_us": 21.4},
            {"column": "limit", "variant": "memcpy", "unit": "GB/s", "value": 12.5},
            {"column": "limit", "variant": "non-temporal", "absent": "no C compiler"},
            {"column": "vineyard", "variant": "", "absent": "did not start: no socket"}]},
        {"id": "readers2", "title": "readers", "reach": "", "cells": [
            {"column": "kvstored", "variant": "", "unit": "/s", "value": 1234567, "ratio": 1.9,
             "ratio_of": "one client", "fairness": 0.97}]},
    ],
}  # fmt: skip


def table_of(run, layout=markdown) -> dict[str, dict[str, str]]:
    """{row title: {heading: text}} of the Markdown."""
    lines = [line for line in layout(run).splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set(split[1]) == {"---"} and len({len(cells) for cells in split}) == 1
    return {cells[0]: dict(zip(split[0], cells, strict=True)) for cells in split[2:]}


def test_a_figure_keeps_its_unit_and_its_extras():
    table = table_of(RUN)
    assert table["look-up"]["kvstored"] == "2.13 µs (p99 3.00; 500,000 resident)"
    assert table["look-up"]["Redis"] == "1,140 µs (700 µs of the server's CPU)"
    assert table["readers"]["kvstored"] == "1,234,567 /s = 1.90 × one client (slowest 0.97 × fastest)"


def test_variants_of_one_column_share_a_cell():
    table = table_of(RUN)
    assert table["put"]["kvstored"] == (
        "NumPy fill: 9.50 GB/s = 0.80 × memcpy<br>"
        "copy_into: 15.1 GB/s = 1.21 × memcpy (21.4 µs beside the copy)"
    )
    assert table["put"]["limit"] == "memcpy: 12.5 GB/s<br>non-temporal: — [3]"


def test_what_was_not_measured_is_named_once_with_its_reason():
    table, text = table_of(RUN), markdown(RUN)
    assert table["look-up"]["vineyard"] == table["put"]["vineyard"] == "— [1]"
    assert text.count("did not start: no socket") == 1
    assert "1. vineyard: did not start: no socket" in text
    assert "2. Mooncake: not installed: no such wheel" in text
    assert "3. limit: no C compiler" in text
    assert table["look-up"]["Mooncake"] == "— [2]"


def test_the_compact_table_has_all_peers_in_one_cell_best_first():
    run = copy.deepcopy(RUN)
    run["rows"][0]["cells"].append(
        {"column": "lmdb", "variant": "", "unit": "us", "value": 47.0, "p99": 90.0, "note": "in process"}
    )
    table = table_of(run, compact)
    assert table["look-up"]["kvstored"] == "2.13 µs"
    assert table["look-up"]["peers"] == "LMDB 47 µs (in process)<br>Redis 1,140 µs<br>vineyard — [1]"
    assert table["put"]["kvstored"].endswith("copy_into: 15.1 GB/s = 1.21 × memcpy (21.4 µs beside the copy)")
    assert "3. Mooncake: not installed: no such wheel" in compact(run)


def test_a_column_nobody_asked_for_is_not_shown():
    assert "KVBoost" not in table_of(RUN)["look-up"]


def test_machine_and_command_stand_above_the_table():
    first = markdown(RUN).splitlines()[0]
    for part in ("A CPU", "2 cores", "kernel 6.1", "load 0.1", "`python -m bench`", "3 rounds"):
        assert part in first


def test_quick_says_so():
    quick = copy.deepcopy(RUN)
    quick["quick"] = True
    assert "quick" in markdown(quick).splitlines()[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.714, "0.71"),
        (9.999, "10"),
        (12.46, "12.5"),
        (20.0, "20"),
        (260.4, "260"),
        (1140, "1,140"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def answer(ns, part_ns=()):
    return {"ns": ns, "part_ns": list(part_ns), "cpu_ns": sum(ns), "server_cpu_ns": 0, "note": ""}


def test_latency_figures():
    cell = cell_of("redis", "", [answer([1000, 2000, 9000]), answer([3000, 3000, 3000])])
    assert (cell["unit"], cell["value"], cell["p99"], cell["n"]) == ("us", 3.0, 9.0, 6)
    assert cell["rounds"] == [2.0, 3.0]
    assert "overhead_us" not in cell


def test_bandwidth_figures_and_what_lies_beside_the_copy():
    cell = cell_of(
        "kvstored", "copy_into", [answer([100_000, 100_000], [70_000, 80_000])], bytes_per_call=1_000_000
    )
    assert (cell["unit"], cell["value"], cell["median_us"]) == ("GB/s", 10.0, 100.0)
    assert cell["overhead_us"] == 25.0


def test_ratios_compare_neighbours_in_time():
    """A machine that slows down for all in the second half must not change the ratio."""
    limit = cell_of("limit", "memcpy", [answer([100]), answer([400]), answer([400])], 1000)
    ours = cell_of("kvstored", "", [answer([50]), answer([200]), answer([200])], 1000)
    add_ratios([ours, limit, absent_cell("redis", "", "gone")], limit, "memcpy")
    assert ours["ratio"] == 2.0
    assert "ratio" not in limit


def paced(ns, pace, part_ns=()):
    return {**answer(ns, part_ns), "pace_ns": pace}


def test_where_there_were_enough_quiet_calls_the_figures_are_theirs():
    """Whether a call counts depends on the pace beside it, never on how long it took."""
    yardstick = Yardstick(100)
    rounds = [
        paced([1000, 9000] * 20, [100, 200] * 20, [500, 600] * 20),
        paced([5000] * 40, [200] * 40, [600] * 40),
        paced([7000] * 10, [110] * 10, [500] * 10),
    ]
    cell = cell_of("kvstored", "", rounds, quiet=yardstick.quiet)
    assert (cell["value"], cell["of_all"], cell["n"]) == (1.0, 5.0, 90)
    assert cell["quiet"] == round(30 / 90, 3)
    assert cell["rounds"] == [1.0, None, 7.0]
    assert cell["overhead_us"] == 0.5
    few = cell_of(
        "kvstored", "", [paced([1000] * 19 + [9000] * 21, [100] * 19 + [200] * 21)], quiet=yardstick.quiet
    )
    assert (few["value"], few["quiet"]) == (9.0, 0.475)


def test_a_ratio_takes_the_rounds_that_were_quiet_for_both():
    quiet = Yardstick(100).quiet
    limit = cell_of(
        "limit", "memcpy", [paced([100] * 20, [100] * 20), paced([400] * 20, [100] * 20)], 1000, quiet
    )
    ours = cell_of("kvstored", "", [paced([50] * 20, [200] * 20), paced([100] * 20, [100] * 20)], 1000, quiet)
    add_ratios([ours, limit], limit, "memcpy")
    assert ours["ratio"] == 4.0
    never = cell_of(
        "limit", "memcpy", [paced([100] * 20, [100] * 20), paced([400] * 20, [900] * 20)], 1000, quiet
    )
    add_ratios([ours, never], never, "memcpy")
    assert ours["ratio"] == 1.0


def test_the_best_pace_of_a_run_decides_what_is_quiet():
    yardstick = Yardstick(200)
    assert yardstick.quiet(270) and not yardstick.quiet(271)
    yardstick.seen([150, 100, 300])
    assert yardstick.quiet(135) and not yardstick.quiet(136)


def test_taking_the_pace_leaves_the_process_where_it_may_run():
    allowed = os.sched_getaffinity(0)
    assert pace_ns() > 0
    assert os.sched_getaffinity(0) == allowed


def test_every_call_has_the_slower_pace_of_those_around_it(monkeypatch):
    paces = iter([5, 7, 6, 9, 4])
    monkeypatch.setattr(contract, "here_ns", lambda: next(paces))
    monkeypatch.setattr(contract, "PACE_EVERY_NS", -1)  # after each call, and once at the end
    result = contract.timed(contract.Call(lambda i: None), 0, 3)
    assert result["pace_ns"] == [7, 7, 9]
    assert len(result["ns"]) == 3


def test_a_cell_says_how_much_of_it_was_quiet():
    run = copy.deepcopy(RUN)
    run["pace_us"] = 71
    run["rows"][0]["cells"][0] |= {"quiet": 0.25, "of_all": 5.04}
    run["rows"][0]["cells"][1] |= {"quiet": 0.0, "of_all": 1140.2}
    table = table_of(run)
    assert table["look-up"]["kvstored"] == "2.13 µs (p99 3.00; 25% quiet, all: 5.04; 500,000 resident)"
    assert table["look-up"]["Redis"] == "1,140 µs (700 µs of the server's CPU; hardly ever quiet)"
    assert "best pace (71 µs)" in markdown(run)


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.99, 10), (1.0, 10), (0.0, 1)])
def test_percentile(share, value):
    assert percentile(list(range(10, 0, -1)), share) == value


def test_measuring_rows_again_replaces_them_in_place():
    rows = [{"id": name, "title": name, "reach": "", "cells": []} for name in ("put1m", "new")]
    again = {**RUN, "started": "2026-01-03 00:00 UTC", "versions": {"lmdb": "lmdb 0.9"}, "rows": rows}
    merged = replaced(RUN, again)
    assert [row["id"] for row in merged["rows"]] == ["lookup64", "put1m", "readers2", "new"]
    assert merged["rows"][1]["cells"] == [] and merged["rows"][1]["started"] == "2026-01-03 00:00 UTC"
    assert merged["rows"][0] == RUN["rows"][0] and merged["started"] == RUN["started"]
    assert merged["versions"] == {"redis": "redis 7.0.15", "limit": "glibc 2.36", "lmdb": "lmdb 0.9"}


def test_the_command_prints_the_table_of_a_file(tmp_path):
    target = tmp_path / "run.json"
    target.write_text(json.dumps(RUN))
    done = subprocess.run([sys.executable, "-m", "bench", "--table", str(target)], cwd=ROOT, text=True,
                          capture_output=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == markdown(RUN)
