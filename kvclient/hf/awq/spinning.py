"""Torch's threads that spin behind a parallel loop, and so keep a core from the products' own threads.

Owns one sleeping team of libgomp's for each number of threads that products were asked for. libgomp stops
spinning where it manages more threads than there are cores, and cannot know of ours: the team stands for
them. Never changes how many threads torch takes, nor a result. Invariant: where there are cores for both, or
another runtime than libgomp, torch's threads spin as ever.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path

_for_good = threading.Event()  # never set: a team lives as long as the thread that began it


@cache
def stand_for(threads: int) -> int:
    """Tells libgomp of so many threads of the products, the caller's among them: once, whoever calls.
    How many runtimes heard it.
    """
    return sum(_stand_for(library, threads) for library in _libraries()) if threads > 1 else 0


def _libraries() -> list[str]:
    """Each libgomp that this process has loaded, torch's among them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    return sorted(path for path in paths if Path(path).name.startswith("libgomp"))


def _stand_for(path: str, threads: int) -> bool:
    try:
        library = ctypes.CDLL(path)
        begin, nothing = library.GOMP_parallel, ctypes.cast(library.omp_get_level, ctypes.c_void_p)
    except (OSError, AttributeError):
        return False
    begun = threading.Event()

    def stand() -> None:
        begin(nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
        begun.set()
        _for_good.wait()

    threading.Thread(target=stand, name="kvclient-spinning", daemon=True).start()
    begun.wait()
    return True
