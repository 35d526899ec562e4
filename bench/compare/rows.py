"""The rows of the table: what is measured, how far we want to reach, and which contenders have a word for it.

Data only. The titles and the reach are the ones promised in the project's issue; `method` is the `op_...`
of a contender, and `variants` are the ways in which one column does it.
"""

from dataclasses import dataclass, field

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CYCLE_BYTES = 2 * GIB
INDEX_BLOCKS = 500_000
COLUMNS = ["kvstored", "limit", "vineyard", "redis", "lmdb", "mooncake", "kvboost", "lmcache"]
LIMITS = ["memcpy", "memcpy, tuned", "non-temporal"]


@dataclass(frozen=True)
class Row:
    id: str
    title: str
    reach: str
    session: str  # which set of contenders must be up: index, bulk, readers, first_pass, script
    method: str = ""
    params: dict = field(default_factory=dict)
    ours: tuple[tuple[str, str], ...] = (("", ""),)  # (variant, method when it is another one)
    most: int = 4000  # calls per round at most


def _put(row_id: str, title: str, reach: str, size: int, batch: int = 1) -> Row:
    params = {"bytes": size, "batch": batch, "cycle_bytes": CYCLE_BYTES}
    return Row(
        row_id,
        title,
        reach,
        "bulk",
        "put",
        params,
        (("NumPy fill", "put_numpy"), ("copy_into", "put_copy_into"), ("copy_from", "put_copy_from")),
        max(8, 400 * MIB // (size * batch)),
    )


ROWS = [
    Row(
        "lookup64",
        "look-up of 64 keys, all resident, their records cold (500,000 blocks)",
        "≤ 3.5 µs",
        "index",
        "lookup",
        {"keys": 64, "groups": 7800},
        most=1500,
    ),
    Row(
        "get1",
        "get + release of one block, with its view (4 KiB; any of 4,096, in ours also one again and again)",
        "≤ 1.5 µs",
        "index",
        "get",
        ours=(("any", "get"), ("again", "get_again")),
    ),
    Row(
        "get100",
        "get of 100 blocks in one call (of the same 4,096): untouched / all views",
        "≤ 8 / 25 µs",
        "index",
        "get_many",
        {"blocks": 100},
        (("untouched", "get_many"), ("all views", "get_many_views")),
    ),
    Row("readers1", "reading clients, get/s in total: 1 process", "", "readers", "get", {"clients": 1}),
    Row(
        "readers2",
        "reading clients, get/s in total: 2 processes",
        "≥ 1.7 × one; slowest ≥ 0.8 × fastest",
        "readers",
        "get",
        {"clients": 2},
    ),
    Row(
        "readers8",
        "reading clients, get/s in total: 8 processes",
        "≥ 1.5 × one; slowest ≥ 0.8 × fastest",
        "readers",
        "get",
        {"clients": 8},
    ),
    Row(
        "create64",
        "create and seal, 64 empty blocks in one batch, pool full",
        "≤ 50 µs",
        "index",
        "create_many",
        {"blocks": 64},
        most=1000,
    ),
    _put(
        "put1m",
        "create + fill + seal, 1 MiB one by one",
        "NumPy ≥ 0.75, copy_into ≥ 1.0 × memcpy; ≤ 30 µs beside the copy",
        MIB,
    ),
    _put(
        "put16x1m",
        "create + fill + seal, batches of 16 × 1 MiB",
        "NumPy ≥ 0.95, copy_into ≥ 1.2 × memcpy",
        MIB,
        16,
    ),
    _put("put8m", "create + fill + seal, 8 MiB", "NumPy ≥ 0.95, copy_into ≥ 1.2 × memcpy", 8 * MIB),
    _put("put64m", "create + fill + seal, 64 MiB", "NumPy ≥ 0.95, copy_into ≥ 1.2 × memcpy", 64 * MIB),
    Row(
        "first_pass_read",
        "new client, first pass copying 1 GiB out of memory already in the pool / its second pass",
        "≥ 0.9 ×",
        "first_pass",
        "pass",
        {"bytes": MIB, "blocks": 1024},
        (("", "pass"),),
    ),
    Row(
        "first_pass_write",
        "new client, first 2 GiB put into memory already in the pool / the second 2 GiB",
        "≥ 0.9 ×",
        "first_pass",
        "put",
        {"bytes": MIB, "batch": 1, "cycle_bytes": CYCLE_BYTES, "blocks": 2048},
        (("", "put_numpy"),),
    ),
    Row("reuse", "TTFT with and without the store (bench/reuse_ttft.py), KVBoost beside it", "", "script"),
    Row("daemon", "the daemon's own figures (bench/daemon_figures.py)", "", "script"),
    Row("disk", "blocks to and from files, without the daemon (bench/disk_figures.py)", "", "script"),
    Row("tier", "the disk tier through the daemon, LMCache beside it (bench.disk_daemon)", "", "script"),
]
