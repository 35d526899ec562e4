"""The native primitives alone, without a store: chains, checksums, copies.
`python -m bench.profile.primitives`

Copies go from one source to destinations cycling over 2 GiB of shared memory that was written once before, so
that none is in a cache and none is touched for the first time; contenders alternate; medians.
"""

import mmap
import statistics
import time

import numpy as np

import kvclient
from kvclient.blocks.keys import window_fingerprints

POOL_BYTES = 2 << 30
IDENTITY = bytes(range(32))


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_us(call, rounds=100):
    return statistics.median(seconds(call) for _ in range(rounds)) * 1e6


def chains(tokens=32768):
    ids = np.random.default_rng(0).integers(0, 150_000, tokens, np.int32)
    as_list, wide = ids.tolist(), ids.astype(np.int64)
    print(f"chain of {tokens} tokens, 128 a block:")
    print(f"  int32 buffer          {median_us(lambda: kvclient.chain(IDENTITY, ids)):8.1f} µs")
    print(f"  int64 buffer          {median_us(lambda: kvclient.chain(IDENTITY, wide)):8.1f} µs")
    print(f"  list of int           {median_us(lambda: kvclient.chain(IDENTITY, as_list)):8.1f} µs")
    print(f"  with content keys     {median_us(lambda: kvclient.chain(IDENTITY, ids).content_keys):8.1f} µs")
    print(f"  all window fingerprints {median_us(lambda: window_fingerprints(IDENTITY, ids)):6.1f} µs")


def copies(pool, size):
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    contenders = {
        "memcpy": lambda to: np.copyto(to, source),
        "memcpy, then crc32c": lambda to: (np.copyto(to, source), kvclient.crc32c(source)),
        "copy_into": lambda to: kvclient.copy_into(to, source, checksum=False),
        "copy_into with CRC32C": lambda to: kvclient.copy_into(to, source),
    }
    offset, taken = 0, {name: [] for name in contenders}
    for _ in range(max(12, (256 << 20) // size)):
        for name, copy in contenders.items():
            to = pool[offset : offset + size]
            taken[name].append(seconds(lambda copy=copy, to=to: copy(to)))
            offset = offset + size if offset + 2 * size <= POOL_BYTES else 0
    medians = {name: statistics.median(times) for name, times in taken.items()}
    print(f"copy of {size >> 10} KiB:")
    for name, median in medians.items():
        print(f"  {name:22}{size / median / 1e9:7.1f} GB/s{medians['memcpy'] / median:7.2f} × memcpy")


def main():
    chains()
    data = np.random.default_rng(2).bytes(8 << 20)
    print(f"crc32c of 8 MiB         {len(data) / median_us(lambda: kvclient.crc32c(data)) / 1e3:8.1f} GB/s")
    pool = np.frombuffer(mmap.mmap(-1, POOL_BYTES), np.uint8)
    pool[:] = 1
    for size in (64 << 10, 1 << 20, 8 << 20, 64 << 20):
        copies(pool, size)


if __name__ == "__main__":
    main()
