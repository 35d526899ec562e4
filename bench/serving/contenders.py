"""The servers side by side: ours beside a daemon, `transformers serve`, vLLM and llama.cpp.

Owns how each is started: the same model, fp32, one thread, on loopback; what it is made of is installed then.
What cannot be had is a reason, which the table prints; it never stops a run.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from bench.serving import installed
from bench.serving.gguf_file import in_fp32
from bench.serving.installed import NotThere
from bench.serving.processes import Served

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "bench" / "out" / "serving"
LLAMA_PROGRAM = """
import sys, time
import xllamacpp as x
given = x.CommonParams()
given.model.path, given.port, given.n_ctx, given.n_parallel = sys.argv[1], int(sys.argv[2]), 16384, 8
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
server = x.Server(given)
while True:
    time.sleep(3600)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ours:
    """A daemon and servers beside it. disk: a directory of its disk tier."""

    def __init__(self, model: Path, home: Path, memory: str = "1GiB", disk: Path | None = None) -> None:
        self._model, self.run, self._daemon = model, home / "run", None
        self._given = ["--dir", str(self.run), "--memory", memory]
        if disk is not None:
            self._given += ["--disk", str(disk), "--disk-quota", "8GiB", "--disk-write-priority", "0"]

    def start_daemon(self, *flags: str) -> None:
        command = [sys.executable, "-m", "kvstored", "serve", *self._given, *flags]
        self._daemon = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert self._daemon.stderr is not None
        for line in self._daemon.stderr:
            if " ready " in line:
                break
        else:
            raise RuntimeError("the daemon did not start")

    def stop_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.communicate(timeout=60)
            self._daemon = None

    def server(self, *flags: str) -> Served:
        port = free_port()
        command = [
            sys.executable, "-m", "kvclient.serve", str(self._model), "--dir", str(self.run), "--port",
            str(port), "--dtype", "float32", "--threads", "1", "--served-model-name", self._model.name,
            *flags,
        ]  # fmt: skip
        return Served("kvclient-serve", command, f"http://127.0.0.1:{port}", LOGS / f"ours-{port}.log")


@contextlib.contextmanager
def ours(model: Path, home: Path) -> Iterator[Served]:
    started = Ours(model, home / "ours")
    started.run.parent.mkdir(parents=True, exist_ok=True)
    started.start_daemon("--discard")
    try:
        with started.server() as server:
            yield server
    finally:
        started.stop_daemon()


@contextlib.contextmanager
def hf_serve(model: Path, home: Path, *more: str) -> Iterator[Served]:
    port = free_port()
    command = [*installed.hf(), "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device",
               "cpu", "--dtype", "float32", *more]  # fmt: skip
    with _started("hf serve", command, port) as server:
        yield server


@contextlib.contextmanager
def hf_batching(model: Path, home: Path) -> Iterator[Served]:
    flags = ("--continuous-batching", "--cb-num-blocks", "384", "--cb-block-size", "32",
             "--cb-max-batch-tokens", "1024")  # fmt: skip
    with hf_serve(model, home, *flags) as server:
        yield server


@contextlib.contextmanager
def vllm(model: Path, home: Path) -> Iterator[Served]:
    place, port = installed.vllm(), free_port()
    command = [
        str(place / "bin" / "vllm"), "serve", str(model), "--served-model-name", model.name,
        "--dtype", "float32", "--port", str(port), "--host", "127.0.0.1", "--enable-prefix-caching",
        "--max-model-len", "8192", "--block-size", "32", "--enable-prompt-tokens-details",
        "--enforce-eager",
    ]  # fmt: skip
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
           "PYTHONPATH": str(_named_vllm(home))}  # fmt: skip
    with _started("vLLM", command, port, env) as server:
        yield server


def _named_vllm(home: Path) -> Path:
    """A folder whose metadata says that vLLM is installed, and for CPUs: the package has another name there,
    and without "+cpu" it loads a library that wants AVX-512.
    """
    (found,) = installed.vllm().glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    told = home / "metadata" / f"vllm-{version}.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return told.parent


@contextlib.contextmanager
def llama(model: Path, home: Path) -> Iterator[Served]:
    """llama.cpp on the model's own GGUF file; of the example model in fp32, as the others have it."""
    file = in_fp32(model, installed.BESIDE) or next(iter(sorted(model.glob("*.gguf"))), None)
    if file is None:
        raise NotThere(f"llama.cpp: no .gguf file in {model}; put the model's there")
    place = installed.llama()
    port = free_port()
    command = [sys.executable, "-c", LLAMA_PROGRAM, str(file), str(port)]
    with _started("llama.cpp", command, port, {"PYTHONPATH": str(place)}) as server:
        yield server


def _started(name: str, command: list[str], port: int, env: dict[str, str] | None = None) -> Served:
    try:
        log = LOGS / f"{name.replace(' ', '-')}.log"
        return Served(name, command, f"http://127.0.0.1:{port}", log, env=env)
    except RuntimeError as error:
        raise NotThere(str(error)) from error


CONTENDERS: dict[str, Callable[[Path, Path], AbstractContextManager[Served]]] = {
    "ours": ours, "hf": hf_serve, "hf-cb": hf_batching, "vllm": vllm, "llama": llama,
}  # fmt: skip
