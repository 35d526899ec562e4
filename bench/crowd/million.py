"""A million blocks of 4 KiB beside 100,000: create, look-up of 64, and a killed daemon's next start.

Two daemons with full pools, by turns, so that what else the machine does meets both. Batches of 64 blocks
that each evict 64 others; look-ups of a prompt's 64 blocks, some prompt's of all, and of 64 keys drawn from
all: of a million, neither the index's words nor the records are in the processor's cache. Nor are the page
tables of small pages: so the memory is of huge ones where there are any, as the service has it.
"""

import contextlib
import hashlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

import kvclient
from bench.daemon_figures import Daemon
from bench.pages import huge_tmpfs

BATCH, TURNS, EACH, FEW = 64, 30, 100, 100_000
REACH_RATIO, REACH_S = 1.2, 3.0
ROWS = {"create": "create and seal", "look": "look-up of a prompt", "drawn": "look-up of keys drawn from all"}
LAYOUT = kvclient.Layout(1, 1, 512, "uint8", 3, meta_fixed=0, meta_per_token=0)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


class Full:
    """A daemon whose pool holds so many blocks, and no more."""

    def __init__(self, home: Path, blocks: int, *args: str) -> None:
        self.blocks, self.next = blocks, 0
        limits = "--max-blocks", str(blocks + blocks // 8)
        self.daemon = Daemon(home / "d", f"{blocks * 4}KiB", *limits, *args)
        self.daemon.start()
        self.daemon.wait_faulted()
        self.client = kvclient.connect(dir=str(self.daemon.directory))
        self.layout = self.client.register_layout(LAYOUT)
        while self.next < blocks + blocks // 16:
            self.create()

    def create(self) -> float:
        """µs of a batch: create and seal, with one byte of each block written."""
        keys = [key(self.next + i) for i in range(BATCH)]
        began = time.perf_counter_ns()
        with self.client.create(keys, self.layout) as writer:
            for i in range(BATCH):
                writer[i].layer(0)
        self.next += BATCH
        return (time.perf_counter_ns() - began) / 1e3

    def draw(self) -> int:
        return random.randrange(self.next - self.blocks // 2, self.next - BATCH)

    def look_up_prompt(self) -> float:
        first = self.draw()
        return self.look_up([key(first + i) for i in range(BATCH)])

    def look_up_drawn(self) -> float:
        return self.look_up([key(self.draw()) for _ in range(BATCH)])

    def look_up(self, keys: list[bytes]) -> float:
        """µs."""
        began = time.perf_counter_ns()
        self.client.lookup(keys)
        return (time.perf_counter_ns() - began) / 1e3

    def killed(self) -> tuple[float, int]:
        """Seconds from the start of the next daemon to READY, and how many blocks it has."""
        self.client.close()
        self.daemon.end(signal.SIGKILL)
        took_s = self.daemon.start() / 1e3
        return took_s, self.daemon.stats()["namespaces"][0]["counters"]["blocks"]


def measure(blocks: int, pages: str) -> dict:
    """`pages`: "huge" or "small"."""
    with contextlib.ExitStack() as stack:
        homes = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcrowd-"))) for _ in range(3)]
        args = ("--pool-dir", str(homes[2])) if pages == "huge" else ()
        if args:
            stack.enter_context(huge_tmpfs(homes[2], blocks * 6144 + (1 << 30)))
        few, many = Full(homes[0], FEW, *args), Full(homes[1], blocks, *args)
        took: dict[str, list[float]] = {f"{name}_{row}": [] for name in ("few", "many") for row in ROWS}
        try:
            for _ in range(TURNS):
                for name, full in (("few", few), ("many", many)):
                    for row, one_batch in zip(
                        ROWS, (full.create, full.look_up_prompt, full.look_up_drawn), strict=True
                    ):
                        took[f"{name}_{row}"] += [one_batch() for _ in range(EACH)]
            starts = [many.killed() for _ in range(3)]
        finally:
            few.daemon.__exit__(), many.daemon.__exit__()
    figures = {f"{name}_us": median(each) for name, each in took.items()}
    found = figures | {
        "blocks": blocks,
        **{f"{row}_ratio": figures[f"many_{row}_us"] / figures[f"few_{row}_us"] for row in ROWS},
        "ready_s": [took_s for took_s, _ in starts],
        "kept": starts[0][1],
        "pages": pages,
        "cores": os.cpu_count(),
    }
    ready_s = max(found["ready_s"])
    print(f"{blocks:,} blocks beside {FEW:,}, {pages} pages, medians of batches of {BATCH}:")
    for row, what in ROWS.items():
        took_us, ratio = found[f"many_{row}_us"], found[f"{row}_ratio"]
        print(f"{what}: {took_us:.1f} µs, {ratio:.2f} x (<= {REACH_RATIO})")
    print(f"killed to READY: {ready_s:.2f} s (<= {REACH_S}) with {found['kept']:,} blocks")
    return found
