"""Gets the peers: virtual environments from PyPI, redis-server and a few libraries from Debian.

Everything lies under build/ and is reused. Nothing is installed into the system: Debian packages are
downloaded and unpacked. What cannot be had becomes a reason, which the table prints; it never stops the
run.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / "build" / "bench-venvs"
DEBS = ROOT / "build" / "bench-debs"
LIMITS = ROOT / "build" / "bench-limits"
PIP_TIMEOUT_S = 300

PYTHON_PEERS = {
    "vineyard": ["vineyard==0.24.2"],
    "mooncake": ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"],
    "stores": ["lmdb==3.0.0", "hiredis==3.5.0"],
}
LMCACHE = ["torch==2.13.0", "lmcache==0.5.6"]  # without what only its GPU parts need
LMCACHE_NEEDS = [
    "numpy<=2.2.6",
    "numba",
    "aiofile",
    "aiofiles",
    "blake3",
    "aiohttp",
    "cryptography",
    "fastapi",
    "httpx",
    "msgspec",
    "opentelemetry-api<=1.40.0",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "opentelemetry-exporter-prometheus<=0.61b0",
    "prometheus_client<=0.24.1",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "grpcio>=1.78",
    "grpcio-observability==1.78.0",
    "protobuf<7",
    "redis",
    "safetensors",
    "setuptools<81",
    "sortedcontainers",
    "uvicorn",
    "httptools",
    "cachetools",
    "nvtx",
    "typing_extensions",
    "filelock",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
]
REDIS_DEBS = [
    "redis-tools",
    "redis-server",
    "liblua5.1-0",
    "libjemalloc2",
    "liblzf1",
    "lua-cjson",
    "lua-bitop",
    "libhiredis0.14",
]
MOONCAKE_DEBS = ["libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1"]


@dataclass
class Installed:
    """Where each peer is, or why it is not."""

    pythons: dict[str, str] = field(default_factory=dict)
    redis_server: str = ""
    library_path: str = ""
    copy_library: str = ""
    kvboost_path: str = ""
    lmcache: str = ""
    absent: dict[str, str] = field(default_factory=dict)


def progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _run(command: list[str], timeout_s: float, cwd: Path | None = None) -> None:
    """Run to the end; on failure the last line it printed is the reason."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        raise RuntimeError(f"{Path(command[0]).name} {command[1]}: {lines[-1].strip()[:160]}")


def python_environment(name: str, packages: list[str]) -> str:
    """A virtual environment with these packages; a marker file says that it is complete."""
    home = VENVS / name
    marker, python = home / ".complete", home / "bin" / "python"
    if not marker.exists() or marker.read_text() != "\n".join(packages):
        progress(f"installing {', '.join(packages)}")
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        _run([str(python), "-m", "pip", "install", "-q", *packages], PIP_TIMEOUT_S)
        marker.write_text("\n".join(packages))
    return str(python)


def kvboost_tree() -> str:
    """KVBoost without its dependencies, beside the project's own torch and transformers."""
    home = VENVS / "kvboost"
    if not (home / "kvboost").exists():
        progress("installing kvboost==0.9.0 --no-deps")
        _run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                str(home),
                "kvboost==0.9.0",
            ],
            PIP_TIMEOUT_S,
        )
    return str(home)


def airllm_tree() -> str:
    """AirLLM without its dependencies, beside the project's own torch and transformers."""
    home = VENVS / "airllm"
    if not (home / "airllm").exists():
        progress("installing airllm==4.0.0 --no-deps")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        _run([*pip, "--target", str(home), "airllm==4.0.0"], PIP_TIMEOUT_S)
    return str(home)


def lmcache_program() -> str:
    """Its command, in an environment of its own (1.4 GB)."""
    python = python_environment("lmcache", LMCACHE_NEEDS)
    program = Path(python).with_name("lmcache")
    if not program.exists():
        progress(f"installing {', '.join(LMCACHE)} --no-deps")
        _run([python, "-m", "pip", "install", "-q", "--no-deps", *LMCACHE], PIP_TIMEOUT_S)
    return str(program)


def debian_packages(names: list[str]) -> None:
    """Download and unpack; needs apt's package lists, which root fetches once if they are missing."""
    downloads = DEBS / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not list(downloads.glob(f"{name}_*.deb"))]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise RuntimeError("no apt-get on this machine")
    progress(f"downloading Debian packages {', '.join(missing)}")
    try:
        _run(["apt-get", "download", *missing], PIP_TIMEOUT_S, downloads)
    except RuntimeError:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update"], PIP_TIMEOUT_S)
        _run(["apt-get", "download", *missing], PIP_TIMEOUT_S, downloads)
    for package in downloads.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(DEBS)], 60)


def compile_limit(name: str) -> str:
    """A shared library of that file of bench/limits, for this processor."""
    source = ROOT / "bench" / "limits" / name
    library = LIMITS / source.with_suffix(".so").name
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        LIMITS.mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
        if compiler is None:
            raise RuntimeError("no C compiler")
        _run([compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)], 120)
    return str(library)


def _try(installed: Installed, column: str, step):
    try:
        return step()
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as failure:
        installed.absent[column] = f"not installed: {failure}"
        progress(f"{column}: {installed.absent[column]}")
        return ""


def install(columns: set[str]) -> Installed:
    """Get what these columns of the table need."""
    done = Installed()
    done.library_path = ":".join(str(DEBS / part / "x86_64-linux-gnu") for part in ("usr/lib", "lib"))
    if "vineyard" in columns:
        done.pythons["vineyard"] = _try(
            done, "vineyard", lambda: python_environment("vineyard", PYTHON_PEERS["vineyard"])
        )
    if "mooncake" in columns:
        done.pythons["mooncake"] = _try(
            done, "mooncake", lambda: python_environment("mooncake", PYTHON_PEERS["mooncake"])
        )
        _try(done, "mooncake", lambda: debian_packages(MOONCAKE_DEBS))
    for column in ("redis", "lmdb"):
        if column in columns:
            done.pythons[column] = _try(
                done, column, lambda: python_environment("stores", PYTHON_PEERS["stores"])
            )
    if "redis" in columns:
        done.redis_server = shutil.which("redis-server") or ""
        if not done.redis_server:
            _try(done, "redis", lambda: debian_packages(REDIS_DEBS))
            done.redis_server = str(DEBS / "usr" / "bin" / "redis-server")
    if "limit" in columns:
        done.copy_library = _try(done, "non-temporal copy", lambda: compile_limit("nt_copy.c"))
    if "kvboost" in columns:
        done.kvboost_path = _try(done, "kvboost", kvboost_tree)
    if "lmcache" in columns:
        done.lmcache = _try(done, "lmcache", lmcache_program)
    return done
