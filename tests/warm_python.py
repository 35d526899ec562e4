"""Python processes that have imported already: forked from one that did so once.

Importing torch, transformers and kvclient.hf costs five seconds of processor, what a daemon imports a fifth
of one: more than most tests that need such a process cost otherwise. `WarmPython([sys.executable, …])` is a
subprocess.Popen whose process is forked from a server behind those imports, with its own arguments,
environment, directory and pipes; WarmDaemon is the same behind a daemon's. run() is subprocess.run() of it.
Never for a test of the imports themselves, of an environment variable that is read while importing, of
another hash seed or of what a process's command line says: those start Python.

Invariant: the process is a child of the test's like any other: it is waited for, killed and counted the same
way. The server forks twice and its test process adopts the orphan (PR_SET_CHILD_SUBREAPER, set only
meanwhile). The server has no threads, and ends with the test process: its socket does.
"""

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 150_000  # of a request: the environment and a program
PR_SET_CHILD_SUBREAPER = 36
IMPORTED_BY_MODELS = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.models.auto",
    "kvclient.hf", "kvclient.serve.__main__", "kvclient.serve.http.app", "tests.hf.zoo",
)  # fmt: skip
IMPORTED_BY_DAEMONS = ("kvstored.cli.main", "kvstored.cli.commands", "kvstored.server")
BESIDE = "KVSTORED_TESTS_BESIDE"  # names the descriptor of a WarmWorker's server


# ---------------------------------------------------------------- in the test's process


# Of two threads at once one would hear of the other's process, or stop adopting before it is an orphan.
_handing_over = threading.Lock()
_beside = os.environ.pop(BESIDE, None)  # nobody else's: a descriptor of this process


@cache
def _server(python: str, imported: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> socket.socket:
    if _beside is not None and (python, imported, variables) == (sys.executable, IMPORTED_BY_MODELS, ()):
        return socket.socket(fileno=int(_beside))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [python, "-m", "tests.warm_python", str(there.fileno()), *imported], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict(variables)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, pass_fds=[there.fileno()],
    )  # fmt: skip
    there.close()
    return here


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


class WarmPython(subprocess.Popen):
    """Popen([sys.executable, "-c", code | "-m", module | script, …]). What it cannot hand over is refused."""

    python = sys.executable  # another environment's has what this module needs, too
    imported = IMPORTED_BY_MODELS
    variables: tuple[tuple[str, str], ...] = ()  # that are read while importing
    beside = False  # whether it has a server of its own from the start, for its IMPORTED_BY_MODELS

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: bool, p2cread: int, p2cwrite: int, c2pread: int,
        c2pwrite: int, errread: int, errwrite: int, *_others: Any,
    ) -> None:  # fmt: skip
        assert args[0] == self.python and not (executable or preexec_fn or pass_fds or shell)
        wanted = {
            "argv": [str(word) for word in args[1:]],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "beside": self.beside,
        }
        request = json.dumps(wanted).encode()
        assert len(request) <= MOST_BYTES, "a request is one message"
        files = [p2cread, c2pwrite, errwrite]
        with _handing_over:
            _adopt(True)
            try:
                server = _server(self.python, self.imported, self.variables)
                socket.send_fds(server, [request], [fd if fd >= 0 else n for n, fd in enumerate(files)])
                self.pid = int(server.recv(64))
            finally:
                _adopt(False)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


class WarmDaemon(WarmPython):
    """Of what `-m kvstored` runs."""

    imported = IMPORTED_BY_DAEMONS


class WarmWorker(WarmPython):
    """Of what a process of `pytest -n` runs; `imported` has IMPORTED_BY_MODELS among others."""

    beside = True


def run(
    args: list, timeout: float, check: bool = False, python: type[subprocess.Popen] = WarmPython,
    **options: Any,
) -> subprocess.CompletedProcess:  # fmt: skip
    """subprocess.run() with the output captured as text, in a WarmPython."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with python(args, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, stdout, stderr)
    if check:
        assert done.returncode == 0, stderr
    return done


# ---------------------------------------------------------------- in the server


def _forked(door: socket.socket) -> dict[str, Any] | None:
    """Answers requests. Returns in each forked process what it is to do; None when nobody asks any more."""
    while True:
        message, files, _, _ = socket.recv_fds(door, MOST_BYTES, 3)
        if not message:
            return None
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if (child := os.fork()) == 0:
                for number, file in enumerate(files):
                    os.dup2(file, number)
                for file in (*files, read, write, door.fileno()):
                    os.close(file)
                door.detach()
                return json.loads(message)
            os.write(write, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        door.send(os.read(read, 64))
        for file in (*files, read, write):
            os.close(file)


def _with_server(wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Forks a server beside this process. Returns in both, and in what the server forks, what it is to do."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # the ends of the pipes are the other's
        os.close(null)
        return _forked(there)
    there.close()
    wanted["env"][BESIDE] = str(here.detach())
    return wanted


def _become(wanted: dict[str, Any]) -> None:
    """As the interpreter begins with these arguments, but for its imports."""
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        file = open(number, mode, closefd=False)  # noqa: SIM115
        if mode == "w":
            file.reconfigure(write_through=unbuffered or number == 2, errors="backslashreplace")
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    kind, *rest = wanted["argv"]
    if kind == "-c":
        code, *arguments = rest
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    import importlib

    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # what is shared is not looked at, and so not copied, by those that are forked
    asked = _forked(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None and asked["beside"]:
        asked = _with_server(asked)
    if asked is not None:
        _become(asked)
