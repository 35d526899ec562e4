"""From nanoseconds to the figures of a table cell. Pure: no clock, no process, no file."""

from statistics import median

LEAST_QUIET, LEAST_SHARE = 20, 0.05  # of the calls; the longest take 20 ms


def percentile(values: list[int], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 1))
    return float(ordered[int(rank) - 1])


def cell_of(column: str, variant: str, rounds: list[dict], bytes_per_call: int = 0, quiet=None) -> dict:
    """One contender's cell of one row. `rounds` are the answers of its `run` calls, in order. With `quiet`,
    which judges a pace, the figures are those of the quiet calls, if they are enough."""
    every = [ns for sample in rounds for ns in sample["ns"]]
    value = _value_of(every, bytes_per_call)
    cell = {
        "column": column,
        "variant": variant,
        "unit": "GB/s" if bytes_per_call else "us",
        "value": value,
        "n": len(every),
        "cpu_us": round(sum(sample["cpu_ns"] for sample in rounds) / len(every) / 1e3, 3),
        "server_cpu_us": round(sum(sample["server_cpu_ns"] for sample in rounds) / len(every) / 1e3, 3),
        "note": rounds[-1].get("note", ""),
    }
    if quiet:
        share, enough = _quiet_share(rounds, quiet)
        cell |= {"of_all": value, "quiet": round(share, 3)}
        if enough:
            rounds = [_beside(sample, quiet) for sample in rounds]
            every = [ns for sample in rounds for ns in sample["ns"]]
    cell["value"] = _value_of(every, bytes_per_call)
    cell["rounds"] = [_value_of(sample["ns"], bytes_per_call) if sample["ns"] else None for sample in rounds]
    if bytes_per_call:
        cell["median_us"] = round(median(every) / 1e3, 3)
    cell["p99_us" if bytes_per_call else "p99"] = round(percentile(every, 0.99) / 1e3, 3)
    beside = [
        whole - part
        for sample in rounds
        if len(sample["part_ns"]) == len(sample["ns"])
        for whole, part in zip(sample["ns"], sample["part_ns"], strict=True)
    ]
    if beside:
        cell["overhead_us"] = round(median(beside) / 1e3, 2)
    return cell


def _value_of(ns: list[int], bytes_per_call: int) -> float:
    return round(bytes_per_call / median(ns), 2) if bytes_per_call else round(median(ns) / 1e3, 3)


def enough_quiet(rounds: list[dict], quiet) -> bool:
    return _quiet_share(rounds, quiet)[1]


def _quiet_share(rounds: list[dict], quiet) -> tuple[float, bool]:
    """Which share of the calls was quiet, and whether it is enough to speak for them."""
    paces = [pace for sample in rounds for pace in sample["pace_ns"]]
    found = sum(map(quiet, paces))
    return found / len(paces), found >= max(LEAST_QUIET, LEAST_SHARE * len(paces))


def _beside(sample: dict, quiet) -> dict:
    """The calls of one round that a quiet pace stands beside."""
    kept = [k for k, pace in enumerate(sample["pace_ns"]) if quiet(pace)]
    parted = len(sample["part_ns"]) == len(sample["ns"])
    return {
        "ns": [sample["ns"][k] for k in kept],
        "part_ns": [sample["part_ns"][k] for k in kept] if parted else [],
    }


def add_ratios(cells: list[dict], limit: dict | None, name: str) -> None:
    """How each cell compares with the limit: the median over rounds, as only neighbours in time compare."""
    if limit is None:
        return
    for cell in cells:
        if cell is limit or "rounds" not in cell or cell["unit"] != limit["unit"]:
            continue
        pairs = [pair for pair in zip(cell["rounds"], limit["rounds"], strict=False) if None not in pair]
        pairs = pairs or [(cell["value"], limit["value"])]  # no round was quiet for both
        cell["ratio"] = round(median(ours / theirs for ours, theirs in pairs), 2)
        cell["ratio_of"] = name


def absent_cell(column: str, variant: str, reason: str) -> dict:
    return {"column": column, "variant": variant, "absent": reason}
