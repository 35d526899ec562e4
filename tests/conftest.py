"""Fixtures that every test folder uses: a real daemon in a process of its own, and waiting on a condition.

Owns the processes, directories and shared memory it makes, and removes all of them, also after a failed
test. Never sleeps for a guessed time: readiness is the daemon's own READY=1, everything else a condition
with a deadline.
"""

import contextlib
import gc
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch: two cores, several processes

import pytest

from tests.turns import turn
from tests.warm_python import WarmDaemon

with contextlib.suppress(ImportError):  # tests/gpu runs without it
    from hypothesis import HealthCheck, settings

    # A busy machine is no failure. The rest is as hypothesis has it, which has a profile of its own for CI.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

pytest_plugins = ["tests.processors", "tests.matrix_part", "tests.order"]

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
FEW_DIRECTORIES = "1x1"  # of a disk: the 272 of "2x1" take most of a start, and of what is removed behind it


class DaemonFailed(AssertionError):
    """The daemon ended or said nothing before it was ready; the text has its log."""


class Daemon:
    """One `kvstored serve` process and its runtime directory, kept by `restart()`: the pool is adopted."""

    def __init__(self, dir: Path, memory: str, args: tuple[str, ...], env: dict[str, str]):
        self.dir = dir
        self.args = ["serve", "--dir", str(dir), "--memory", memory, *args]
        self.env = {"KVSTORED_DISK_FANOUT": FEW_DIRECTORIES, **env}
        self.command = [sys.executable]  # what runs `-m kvstored`: a test may put a program in front
        self.warm = False  # forked behind the imports; not for tests of how the process starts
        self.log_path = dir.parent / (dir.name + ".log")
        self.process: subprocess.Popen[bytes] | None = None
        self._prefixes: set[str] = set()  # of shared memory names ever seen in state.json

    @property
    def pid(self) -> int:
        assert self.process is not None, "the daemon was not started"
        return self.process.pid

    @property
    def socket_path(self) -> Path:
        return self.dir / "kvstored.sock"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self, timeout_s: float = START_TIMEOUT_S) -> "Daemon":
        """Starts the process and returns when it says READY=1. Raises DaemonFailed with the log."""
        assert self.process is None or self.process.poll() is not None, "the daemon is running already"
        notify_path = str(self.dir.parent / (self.dir.name + ".notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(notify_path)
            notify.bind(notify_path)
            with open(self.log_path, "ab") as log:
                python = WarmDaemon if self.warm and self.command == [sys.executable] else subprocess.Popen
                self.process = python(
                    [*self.command, "-m", "kvstored", *self.args],
                    cwd=ROOT, env={**os.environ, **self.env, "NOTIFY_SOCKET": notify_path},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
            self._wait_ready(notify, time.monotonic() + timeout_s)
        os.unlink(notify_path)
        self._note_segments()
        return self

    def _wait_ready(self, notify: socket.socket, deadline: float) -> None:
        assert self.process is not None
        pidfd = os.pidfd_open(self.process.pid)
        poll = select.poll()
        poll.register(notify, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                ready = dict(poll.poll(left_s * 1000))
                if notify.fileno() in ready and b"READY=1" in notify.recv(4096).split(b"\n"):
                    return
                if pidfd in ready:
                    status = self.process.wait()
                    raise DaemonFailed(f"the daemon ended with {status} before it was ready:\n{self.log()}")
            self.process.kill()
            self.process.wait()
            raise DaemonFailed(f"the daemon did not say READY=1 in time:\n{self.log()}")
        finally:
            os.close(pidfd)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, then SIGKILL after the deadline, which fails the test. Returns the exit status."""
        if self.process is None:
            return 0
        self._note_segments()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise DaemonFailed(f"the daemon did not end {timeout_s} s after SIGTERM:\n{self.log()}") from None

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone. The pool and the runtime directory stay."""
        assert self.process is not None, "the daemon was not started"
        self._note_segments()
        self.process.kill()
        self.process.wait()

    def restart(self, kill: bool = False) -> "Daemon":
        """Ends the process (SIGTERM, or SIGKILL with kill=True) and starts another on the same directory."""
        if kill:
            self.kill()
        else:
            self.stop()
        return self.start()

    def connect(self, **options: object):
        """A kvclient.KVClient on this daemon."""
        import kvclient

        return kvclient.connect(dir=str(self.dir), **options)

    def _note_segments(self) -> None:
        with contextlib.suppress(OSError):
            self._prefixes |= set(re.findall(r"kvstored-[0-9A-Za-z]+", (self.dir / "state.json").read_text()))

    def remove(self) -> None:
        """Removes what the daemon leaves for a successor: its directory and its shared memory."""
        for prefix in self._prefixes:
            for segment in Path("/dev/shm").glob(prefix + "*"):
                segment.unlink(missing_ok=True)
        shutil.rmtree(self.dir, ignore_errors=True)
        self.log_path.unlink(missing_ok=True)


BASE_NAME = "kvstored-test-"
# Daemons of these tests are forked behind their imports; elsewhere they start as a user's do.
WARM = (
    "tests/daemon/disk/", "tests/daemon/life/test_commands.py", "tests/daemon/life/test_health.py",
    "tests/daemon/life/test_operations.py", "tests/daemon/life/test_reload.py", "tests/daemon/memory/",
    "tests/daemon/rpc/", "tests/fault/", "tests/hf/", "tests/hosts/", "tests/hostile/", "tests/serve/",
)  # fmt: skip


def remove_left_behind() -> None:
    """What a killed test run left: its daemons, their directories, and pools that would fill the memory."""
    for base in Path(tempfile.gettempdir()).glob(f"{BASE_NAME}[0-9]*-*"):
        run_pid = int(base.name.removeprefix(BASE_NAME).partition("-")[0])
        if Path(f"/proc/{run_pid}").exists() or base.stat().st_uid != os.geteuid():
            continue
        for directory in base.glob("d*/"):
            with contextlib.suppress(OSError, ValueError):
                pid = int((directory / "pid").read_text())
                files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
                if any(file.startswith(str(directory)) for file in files):
                    os.kill(pid, signal.SIGKILL)
            left = Daemon(directory, "", (), {})
            left._note_segments()
            left.remove()
        shutil.rmtree(base, ignore_errors=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # once, not by each process of `pytest -n`
        remove_left_behind()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Started in the background by a shell: every process of a test would inherit the deafness.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # what is collected stays: looking through it, again and again, is a quarter of collecting


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m gpu` runs from a bare checkout, with torch and the kernels: it looks at no other folder."""
    here = collection_path.parent == ROOT / "tests" and collection_path.is_dir()
    return True if here and config.getoption("markexpr") == "gpu" and collection_path.name != "gpu" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays: gc.collect(), which many tests call, need not go through it
    again (hundreds of milliseconds a call, beside torch).
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)  # a test that needs it calls it; by itself it took 2 % of a run
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waiting for the turn is no part of the test's time
def pytest_runtest_protocol(item: pytest.Item):
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """A factory: `daemon()` starts one and returns it ready. Several are fine; all are ended after the test.

    `daemon(memory="64MiB", args=("--max-blocks", "1000"), env={...}, start=False)`.
    """
    # Not tmp_path: a Unix socket's path has at most 107 bytes.
    base = Path(tempfile.mkdtemp(prefix=f"{BASE_NAME}{os.getpid()}-"))
    base.chmod(0o755)
    started: list[Daemon] = []
    small = "256MiB" if request.node.get_closest_marker("engines") else "32MiB"  # all touched

    def make(
        memory: str = "",
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        start: bool = True,
    ) -> Daemon:
        directory = base / f"d{len(started)}"
        directory.mkdir(mode=0o755)  # sessions of other users reach the socket through it
        new = Daemon(directory, memory or small, tuple(args), env or {})
        new.warm = request.node.nodeid.startswith(WARM)
        started.append(new)
        return new.start() if start else new

    with contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, base, ignore_errors=True)
        yield make
        for running in started:
            at_end.callback(running.remove)
        if request.node.stash.get(FAILED, False):
            for running in started:
                print(f"--- log of {running.dir.name} ---\n{running.log()}")
        for running in started:
            at_end.callback(running.stop)


def wait_for(condition: Callable[[], object], what: str = "the condition", timeout_s: float = 60.0) -> None:
    """Until it holds. Fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not true after {timeout_s} s"
        select.select([], [], [], pause_s)  # between looks; the verdict never depends on its length
        pause_s = min(pause_s * 2, 0.05)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(lambda: condition, "what is awaited", timeout_s=10)`."""
    return wait_for


@pytest.fixture
def integrity() -> Callable[..., None]:
    """`integrity(daemon)`: the daemon's tables agree with each other."""

    def check(daemon) -> None:
        from kvstored.v1 import admin_pb2
        from tests.conformance.grpc_door import GrpcClient

        with GrpcClient(str(daemon.dir / "grpc.sock")) as door:
            door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=30)

    return check


@pytest.fixture
def rig(daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Callable[..., object]]:
    """`rig(faults)`: a daemon with a disk tier whose calls fail on that schedule."""
    from tests.fault.disks.rig import DiskRig  # not at import: most tests need neither it nor NumPy

    made: list[DiskRig] = []

    def make(faults: str = "", **options: object) -> DiskRig:
        directory = options.pop("directory", None) or tmp_path / f"disk{len(made)}"
        made.append(DiskRig(daemon, directory, faults, **options))
        return made[-1]

    yield make
    for built in made:
        built.drop_client()
