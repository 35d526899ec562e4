"""What the client's calls cost and where: look-ups hot and cold, and create and seal apart, through a daemon.

    python -m bench.profile.calls

The same daemon, data and calls as the rows of `make bench`; a line is the median of ROUNDS calls. All is
repeated, because a machine that others share changes its speed: `one key hot` says how fast it is just then.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.pages import huge_pages_to_be_had, huge_tmpfs
from bench.peers.ours import MIB, Ours, layout_of

BLOCKS = 500_000
KEYS = 64
ROUNDS = 2000
ROOM = 3 << 30


def timed(call, arguments) -> float:
    """Median microseconds; the arguments are made outside the clock."""
    times = []
    for argument in arguments:
        start = time.perf_counter_ns()
        call(argument)
        times.append(time.perf_counter_ns() - start)
    return median(times) / 1e3


def look_ups(ours: Ours) -> str:
    parts = [chain[at : at + KEYS] for chain in ours.prompts for at in range(0, len(chain), KEYS)]
    for part in parts:
        part.packed_keys  # noqa: B018  (a chain has just been computed when it is looked up)
    cold = [parts[i] for i in ours.rng.permutation(len(parts))[:ROUNDS]]
    lookup = ours.client.lookup
    hot_us = timed(lookup, [parts[0][:1]] * ROUNDS)
    hot, far = timed(lookup, [parts[0]] * ROUNDS), timed(lookup, cold)
    return f"one key hot {hot_us:.2f}, {KEYS} hot {hot:.2f}, {KEYS} cold {far:.2f} µs"


def creates(ours: Ours, layout: int, blocks: int) -> str:
    ours.refill(layout)
    clock, times = time.perf_counter_ns, []
    for _ in range(ROUNDS):
        chain = ours.new_chain(blocks)
        begin = clock()
        writer = ours.client.create(chain, layout)
        middle = clock()
        for index in range(blocks):
            writer[index].view  # noqa: B018  (asked for, so that it may be sealed)
        filled = clock()
        writer.seal()
        times.append((middle - begin, clock() - filled))
    create, seal = (median(part) / 1e3 for part in zip(*times, strict=True))
    return f"create {create:.1f} + seal {seal:.1f} µs"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--times", type=int, default=3, help="how often all of it is measured")
    times = arguments.parse_args().times
    with contextlib.ExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory()))
        if huge := huge_pages_to_be_had():
            held.enter_context(huge_tmpfs(directory, ROOM))
        ours = Ours()
        held.callback(ours.close)
        ours.setup(
            {
                "dir": str(directory),
                "shm_dir": str(directory),
                "pool_bytes": 2048 * MIB,
                "max_blocks": BLOCKS + 50_000,
                "blocks": BLOCKS,
            }
        )
        print(f"pages: {'huge' if huge else 'small'}")
        for _ in range(times):
            print(f"look-up: {look_ups(ours)}")
        for blocks, size in ((1, MIB), (KEYS, 3072)):
            layout = ours.client.register_layout(layout_of(size))
            for _ in range(times):
                print(f"{blocks} of {size >> 10} KiB, pool full: {creates(ours, layout, blocks)}")


if __name__ == "__main__":
    main()
