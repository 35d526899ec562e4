"""What a pass of the made 7B is made of: a layer's products of many rows, and memory that is read once.

Owns the matrices of one layer. Never reads a file. Invariant: what is compared alternates, and the median of
either side's rounds is told.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from statistics import median

from bench.install import compile_limit
from bench.streaming.model import GROUP, LINEARS

ROUNDS = 3
READ_BYTES, READ_ROUNDS = 1 << 30, 7


def prefill(rows: int, threads: int) -> dict:
    """Each product of a layer, packed and as torch multiplies numbers of bf16: seconds of wall and of the
    processor, by its name. The head is not among them: only a prompt's last row is multiplied by it.
    """
    import torch

    from kvclient.hf.awq.linear import AwqLinear

    torch.set_num_threads(threads)
    dice, found = torch.Generator().manual_seed(7), {}
    for name, (inputs, outputs, _) in LINEARS.items():
        packed = AwqLinear(inputs, outputs, GROUP, False, torch.bfloat16)
        packed.qweight.random_(-(1 << 31), (1 << 31) - 1, generator=dice)
        packed.qzeros.fill_(0x77777777)
        packed.scales.fill_(1.5e-4)
        x = torch.randn((rows, inputs), generator=dice).bfloat16()
        numbers = packed.weights(0, outputs, torch.bfloat16).t().contiguous()
        sides = {
            "packed": packed,
            "numbers": lambda x, numbers=numbers: torch.nn.functional.linear(x, numbers),
        }
        took: dict[str, list] = {side: [] for side in sides}
        with torch.inference_mode():
            for _ in range(ROUNDS):
                for side, multiply in sides.items():
                    began, cpu = time.perf_counter(), time.process_time()
                    multiply(x)
                    took[side].append((time.perf_counter() - began, time.process_time() - cpu))
        found[name] = {
            side: [median(column) for column in zip(*rounds, strict=True)] for side, rounds in took.items()
        }
    whole = {side: [sum(row[side][i] for row in found.values()) for i in (0, 1)] for side in sides}
    share = [whole["numbers"][i] / whole["packed"][i] for i in (0, 1)]
    return {"rows": rows, "layer": whole, "products": found, "share": share[0], "cpu_share": share[1]}


def bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read from huge pages, each its part: the best of some rounds."""
    read = ctypes.CDLL(compile_limit("read_once.c")).read_once
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
    memory = mmap.mmap(-1, READ_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    held = (ctypes.c_char * READ_BYTES).from_buffer(memory)
    base, part, best = ctypes.addressof(held), READ_BYTES // threads // 4096 * 4096, 0.0
    ctypes.memset(base, 1, READ_BYTES)
    for _ in range(READ_ROUNDS):
        workers = [threading.Thread(target=read, args=(base + i * part, part)) for i in range(threads)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, threads * part / (time.perf_counter() - began))
    return best
