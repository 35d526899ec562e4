"""What the measurements ran on: model, cores, kernel, memory, load, and the settings that move copies."""

import os
import platform
from pathlib import Path


def _first(path: str, prefix: str = "") -> str:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(prefix):
                return line.partition(":")[2].strip() if prefix else line.strip()
    except OSError:
        pass
    return "unknown"


def _chosen(path: str) -> str:
    """The bracketed word of a kernel setting like `always [madvise] never`."""
    text = _first(path)
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text


def describe() -> dict:
    hugepages = "/sys/kernel/mm/transparent_hugepage"
    flags = _first("/proc/cpuinfo", "flags").split()
    return {
        "model": _first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 1048576, 1),
        "kernel": platform.release(),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION") or "unknown",
        "python": platform.python_version(),
        "isa": [flag for flag in ("avx2", "avx512f", "amx_tile", "sha_ni") if flag in flags],
        "huge_pages_shm": _chosen(f"{hugepages}/shmem_enabled"),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def sentence(machine: dict) -> str:
    return (
        f"{machine['model']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"kernel {machine['kernel']}, {machine['glibc']}, "
        f"Python {machine['python']}, load {machine['load_1m']} at the start"
    )
