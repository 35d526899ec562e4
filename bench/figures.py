"""From nanoseconds to the figures of a table cell. Pure: no clock, no process, no file."""

from statistics import median


def percentile(values: list[int], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 1))
    return float(ordered[int(rank) - 1])


def cell_of(column: str, variant: str, rounds: list[dict], bytes_per_call: int = 0) -> dict:
    """One contender's cell of one row. `rounds` are the answers of its `run` calls, in order."""
    every = [ns for one in rounds for ns in one["ns"]]
    per_round = [median(one["ns"]) for one in rounds]
    cell = {
        "column": column,
        "variant": variant,
        "unit": "us",
        "value": round(median(every) / 1e3, 3),
        "p99": round(percentile(every, 0.99) / 1e3, 3),
        "rounds": [round(ns / 1e3, 3) for ns in per_round],
        "n": len(every),
        "cpu_us": round(sum(one["cpu_ns"] for one in rounds) / len(every) / 1e3, 3),
        "server_cpu_us": round(sum(one["server_cpu_ns"] for one in rounds) / len(every) / 1e3, 3),
        "note": rounds[-1].get("note", ""),
    }
    if bytes_per_call:
        cell["unit"], cell["median_us"], cell["p99_us"] = "GB/s", cell["value"], cell.pop("p99")
        cell["value"] = round(bytes_per_call / median(every), 2)
        cell["rounds"] = [round(bytes_per_call / ns, 2) for ns in per_round]
    beside = [
        whole - part
        for one in rounds
        if len(one["part_ns"]) == len(one["ns"])
        for whole, part in zip(one["ns"], one["part_ns"], strict=True)
    ]
    if beside:
        cell["overhead_us"] = round(median(beside) / 1e3, 2)
    return cell


def add_ratios(cells: list[dict], limit: dict | None, name: str) -> None:
    """How each cell compares with the limit: the median over rounds, as only neighbours in time compare."""
    if limit is None:
        return
    for cell in cells:
        if cell is limit or "rounds" not in cell or cell["unit"] != limit["unit"]:
            continue
        pairs = list(zip(cell["rounds"], limit["rounds"], strict=False))
        if pairs:
            cell["ratio"] = round(median(own / theirs for own, theirs in pairs), 2)
            cell["ratio_of"] = name


def absent_cell(column: str, variant: str, reason: str) -> dict:
    return {"column": column, "variant": variant, "absent": reason}
