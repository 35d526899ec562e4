"""The CPU kernels beside torch: decode, append, prefill. `python -m bench.attention [--threads N] [--quick]`

All contenders of a row alternate within one process: on one thread, CPU time of that thread; on several, all
of them on as many, wall time. Medians over the rounds. Read bandwidth is a read-only reduction over the very
bytes of the row's blocks, in the same rounds and by as many threads; caches help neither, as the other
contenders' bytes come between. Prints a table and, with --json, writes
every number. Owns nothing that lasts; never judges: the reach stands beside the number.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's idle threads do not look for work beside ours

import numpy as np
import torch
from torch.nn import functional

from bench.machine import describe, sentence
from bench.pace import Yardstick, here_ns
from kvclient import kernels

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 8, 4, 128, 128
CONTEXT = 16_384
FORMS = {  # bits and tokens that share a scale of K
    "bf16": (0, 0), "int8 g128": (8, 128), "int8 g32": (8, 32), "int4 g128": (4, 128), "int4 g32": (4, 32),
}  # fmt: skip
REACH = {"bf16": (3, 1.3), "int8": (6, 2.5), "int4": (6, 3.5)}  # times HF's default, times torch's best
Timed = dict[str, Callable[[], object]]
Result = dict[str, object]
LEAST_QUIET = 3  # calls of each contender
MOST_ROUNDS = 5  # times those asked for


def as_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


class Pool:
    """One piece of memory that blocks lie in, as in the daemon's pool: shared, arrays at multiples of 512
    bytes. `huge`: on huge pages, private, as good as a pool on a mount that has them.
    """

    def __init__(self, size: int, huge: bool) -> None:
        kind = mmap.MAP_PRIVATE if huge else mmap.MAP_SHARED
        self.memory, self.used = mmap.mmap(-1, size, kind | mmap.MAP_ANONYMOUS), 0
        if huge:
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def put(self, array: np.ndarray) -> np.ndarray:
        out = np.frombuffer(self.memory, array.dtype, array.size, self.used).reshape(array.shape)
        self.used += -(-array.nbytes // 512) * 512
        out[...] = array
        return out

    def reader(self) -> Callable[[], object]:
        """Reads every byte that was put, and nothing else."""
        return torch.frombuffer(self.memory, dtype=torch.int64, count=self.used // 8).sum


class Problem:
    """bf16 keys and values of `context` tokens, and `tokens` queries behind them."""

    def __init__(self, tokens: int, context: int, kv_heads: int = KV_HEADS, threads: int = 1) -> None:
        self.threads = threads
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> np.ndarray:
            return (
                torch.randn(shape, generator=generator, dtype=torch.bfloat16)
                .view(torch.int16)
                .numpy()
                .view(np.uint16)
            )

        self.keys, self.values = (noise(kv_heads, context, HEAD_DIM) for _ in range(2))
        self.q = noise(1, kv_heads * GROUP, tokens, HEAD_DIM)
        self.position = np.arange(context - tokens, context, dtype=np.int64)[None]
        self.torch_q, self.torch_k, self.torch_v = (
            as_torch(self.q), as_torch(self.keys)[None], as_torch(self.values)[None],
        )  # fmt: skip

    def segments(
        self, stop: int, bits: int = 0, group: int = 128, huge: bool = False
    ) -> tuple[list[kernels.Segment], Pool]:
        """Blocks of 128 tokens, and the memory they lie in."""
        pool, parts = Pool(2 * self.keys.nbytes + (16 << 20), huge), []
        for start in range(0, stop, BLOCK):
            k, v = (np.ascontiguousarray(x[:, start : start + BLOCK]) for x in (self.keys, self.values))
            if bits:
                k, v = kernels.quantise(k, bits, group), kernels.quantise(v, bits, 0)
                names = ("codes", "scale", "zero")
                k, v = (replace(x, **{name: pool.put(getattr(x, name)) for name in names}) for x in (k, v))
            else:
                k, v = pool.put(k), pool.put(v)
            parts.append(kernels.segment(k, v, start))
        return parts, pool

    def ours(self, parts: list[kernels.Segment], tail: kernels.Segment | None = None) -> Callable[[], object]:
        out = np.empty_like(self.q)
        return kernels.prepare(
            self.q, self.position, [parts], HEAD_DIM**-0.5, tails=[tail], threads=self.threads, out=out
        ).run


def rounds(calls: Timed, count: int, threads: int) -> Result:
    """Medians of seconds, all calls alternating; of the quiet calls where each has LEAST_QUIET. While one has
    fewer, rounds go on, up to MOST_ROUNDS times those asked for."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    yardstick = Yardstick.now(1.0)
    for call in calls.values():  # warms up
        call()
    for number in range(MOST_ROUNDS * count):
        for name, call in calls.items():
            pace, began = here_ns(), clock()
            call()
            seconds = clock() - began
            taken[name].append((seconds, max(pace, here_ns())))
        yardstick.seen([pace for times in taken.values() for _, pace in times])
        quiet = {
            name: [seconds for seconds, pace in times if yardstick.quiet(pace)]
            for name, times in taken.items()
        }
        enough = all(len(times) >= LEAST_QUIET for times in quiet.values())
        if enough and number + 1 >= count:
            break
    every = {name: [seconds for seconds, _ in times] for name, times in taken.items()}
    return {
        "seconds": {name: median(times) for name, times in (quiet if enough else every).items()},
        "all": {name: median(times) for name, times in every.items()},
        "quiet": enough,
    }


def decode(count: int, threads: int, huge: bool) -> dict:
    """One token over 16k: HF's default call, torch's best layout for it (packed GQA), and ours in place."""
    problem = Problem(1, CONTEXT, threads=threads)
    q, k, v = problem.torch_q, problem.torch_k, problem.torch_v
    packed = q.view(1, KV_HEADS, GROUP, HEAD_DIM)
    calls: Timed = {
        "hf": lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "torch best": lambda: functional.scaled_dot_product_attention(packed, k, v),
    }
    sizes, readers = {}, {}
    for name, (bits, group) in FORMS.items():
        parts, pool = problem.segments(CONTEXT, bits, group, huge)
        sizes[name] = pool.used
        calls[name] = problem.ours(parts)
        readers["read " + name] = pool.reader()
    calls |= readers  # after all: no cache still has what it reads
    return rounds(calls, count, threads) | {"bytes": sizes}


def append(count: int, threads: int, tokens: int) -> dict:
    """A hit's suffix: `tokens` over a 16k prefix in int8, in place; torch dequantises first and masks."""
    problem = Problem(tokens, CONTEXT + tokens, 2, threads)
    parts, _ = problem.segments(CONTEXT, 8)
    plain, _ = problem.segments(CONTEXT)
    tail = kernels.segment(
        np.ascontiguousarray(problem.keys[:, CONTEXT:]),
        np.ascontiguousarray(problem.values[:, CONTEXT:]),
        CONTEXT,
    )
    k, v = (x.repeat_interleave(GROUP, 1) for x in (problem.torch_k, problem.torch_v))
    seen = torch.arange(CONTEXT + tokens) <= torch.arange(CONTEXT, CONTEXT + tokens)[:, None]

    def dequantise() -> None:
        for part in parts:
            place = slice(part.struct.base_position, part.struct.base_position + BLOCK)
            kernels.dequantise(part.alive[0], problem.keys[:, place])
            kernels.dequantise(part.alive[1], problem.values[:, place])

    def torch_after() -> None:
        dequantise()
        functional.scaled_dot_product_attention(problem.torch_q, k, v, seen[None, None])

    calls = {"dequantise + torch": torch_after}
    calls |= {"int8": problem.ours(parts, tail), "bf16": problem.ours(plain, tail)}
    return rounds(calls, count, threads)


def prefill(count: int, threads: int, tokens: int) -> dict:
    problem = Problem(tokens, tokens, 2, threads)
    k, v = (x.repeat_interleave(GROUP, 1) for x in (problem.torch_k, problem.torch_v))
    call = functional.scaled_dot_product_attention
    calls = {
        "torch": lambda: call(problem.torch_q, k, v, is_causal=True),
        "torch gqa": lambda: call(
            problem.torch_q, problem.torch_k, problem.torch_v, is_causal=True, enable_gqa=True
        ),
        "bf16": problem.ours([kernels.segment(problem.keys, problem.values, 0)]),
    }
    return rounds(calls, count, threads)


def table(results: dict, which: str = "seconds") -> list[tuple[str, str, str]]:
    """(what, reach, measured), of the quiet calls or of `all`."""
    seconds, sizes = results["decode"][which], results["decode"]["bytes"]
    rows = []
    for name in FORMS:
        default, best = REACH[name.split()[0]]
        cost, rate = seconds[name], sizes[name] / seconds[name] / 1e9
        read = sizes[name] / seconds["read " + name] / 1e9
        reach = f"≥ {default} × HF, ≥ {best} × torch's best" + ", ≥ 0.7 × read" * name.startswith("int8")
        got = (
            f"{cost * 1e3:.2f} ms: {seconds['hf'] / cost:.1f} × HF, "
            f"{seconds['torch best'] / cost:.1f} × torch's"
        )
        got += f" best, {rate:.1f} of {read:.1f} GB/s read ({rate / read:.2f} ×)"
        rows.append((f"decode {name}, in place", reach, got))
    for tokens, result in results["append"].items():
        s = result[which]
        got = f"{s['int8'] * 1e3:.0f} ms: {s['dequantise + torch'] / s['int8']:.1f} ×"
        got += f"; bf16 in place {s['bf16'] * 1e3:.0f} ms"
        rows.append((f"append {tokens} over 16k, int8 in place", "≥ 1.5 × dequantise + SDPA", got))
    for tokens, result in results["prefill"].items():
        s = result[which]
        got = f"{s['bf16'] * 1e3:.0f} ms: {min(s['torch'], s['torch gqa']) / s['bf16']:.1f} ×"
        rows.append((f"prefill {tokens}, bf16", "≥ 1.0 × torch SDPA", got))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, default=1, help="of every contender; default 1")
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine")
    parser.add_argument("--huge", action="store_true", help="decode from blocks on huge pages")
    args = parser.parse_args()
    if not 1 <= args.threads <= (cpus := len(os.sched_getaffinity(0))):
        parser.error(f"--threads {args.threads}: it must be 1 to {cpus}, the processors of this machine")
    torch.set_num_threads(args.threads)
    count, threads = 3 if args.quick else 9, args.threads
    results = {"machine": describe(), "path": kernels.auto_path(), "threads": threads}
    results["decode"] = decode(count, threads, args.huge)
    results["append"] = {
        n: append(max(2, count // 3), threads, n) for n in ((512,) if args.quick else (256, 2048))
    }
    results["prefill"] = {
        n: prefill(max(2, count // 2), threads, n) for n in ((1024,) if args.quick else (1024, 4096))
    }
    print(f"{sentence(results['machine'])} Path {results['path']}, threads: {threads}.\n")
    print("| what | reach | quiet (bench/pace.py), or all if too few were | all |\n|---|---|---|---|")
    for (what, reach, got), (*_, of_all) in zip(table(results), table(results, "all"), strict=True):
        print(f"| {what} | {reach} | {got} | {of_all} |")
    parts = [results["decode"], *results["append"].values(), *results["prefill"].values()]
    print(f"\n{sum(part['quiet'] for part in parts)} of {len(parts)} groups of rows had enough quiet calls.")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
