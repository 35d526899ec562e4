"""The limit: memcpy (glibc as it is, or tuned by GLIBC_TUNABLES from outside) and the best non-temporal copy.

Same source each time, destinations cycling over a shared, faulted-in mapping of at least 2 GiB, as for the
stores.
"""

import ctypes
import mmap
import os
import random
import time
from pathlib import Path
from statistics import median

from bench.peers.contract import Call, serve

MADV_POPULATE_WRITE = 23
TRIALS = 10


class Copy:
    def __init__(self):
        self.map = None

    def setup(self, params):
        size = params["pool_bytes"]
        self.path = params.get("address") or str(Path(params["shm_dir"]) / "limits")
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, size)
        self.map = mmap.mmap(fd, size)
        os.close(fd)
        self.map.madvise(MADV_POPULATE_WRITE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.libc, self.fast = ctypes.CDLL(None), None
        self.libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self.libc.memcpy.restype = ctypes.c_void_p
        if params.get("library"):
            self.fast = ctypes.CDLL(params["library"])
            self.fast.variant_copy.argtypes = (
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
            )
            self.fast.variant_copy.restype = None
            self.fast.variant_name.restype = ctypes.c_char_p
        return {"version": "glibc " + os.confstr("CS_GNU_LIBC_VERSION").split()[-1], "resident": 0}

    def info(self):
        return {"address": self.path}

    def copier(self, size, params):
        """(copy, name): plain memcpy, or the fastest non-temporal variant for this size, tried first."""
        if self.fast is None:
            return self.libc.memcpy, ""
        source, runs = ctypes.create_string_buffer(random.randbytes(size), size), self.fast.variant_runs
        taken = {which: [] for which in range(self.fast.variant_count()) if runs(which)}
        slots = len(self.map) // size
        for k in range(TRIALS * max(8, min(200, (200 << 20) // size))):
            which = list(taken)[k % len(taken)]
            start = time.perf_counter_ns()
            self.fast.variant_copy(which, self.base + k % slots * size, ctypes.addressof(source), size)
            taken[which].append(time.perf_counter_ns() - start)
        which, copy = min(taken, key=lambda variant: median(taken[variant])), self.fast.variant_copy
        name = self.fast.variant_name(which).decode()
        return (lambda to, source, n: copy(which, to, source, n)), name

    def op_put(self, params):
        size, batch = params["bytes"], params["batch"]
        slots = params["cycle_bytes"] // size
        assert slots * size <= len(self.map)
        copy, name = self.copier(size, params)
        # Page-aligned, as NumPy's large arrays nearly are; faulted in by the initial bytes.
        self.source = mmap.mmap(-1, size)
        self.source[:] = random.randbytes(size)
        source, base = ctypes.addressof(ctypes.c_char.from_buffer(self.source)), self.base

        def run(i):
            for j in range(batch):
                copy(base + (i * batch + j) % slots * size, source, size)

        return Call(run, note=name)

    def op_pass(self, params):
        """Copy blocks out of a mapping made afresh into one private buffer: what page faults alone cost."""
        size = params["bytes"]
        fd = os.open(self.path, os.O_RDWR)
        self.fresh = mmap.mmap(fd, len(self.map))
        os.close(fd)
        base, slots = ctypes.addressof(ctypes.c_char.from_buffer(self.fresh)), params["blocks"]
        target = ctypes.create_string_buffer(size)
        return Call(
            lambda i: self.libc.memcpy(ctypes.addressof(target), base + i % slots * size, size) and None,
            note="no populate",
        )

    def close(self):
        self.map = None


if __name__ == "__main__":
    serve(Copy())
