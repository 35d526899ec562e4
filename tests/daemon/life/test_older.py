"""Client and daemon of different versions: this tree and the last commit that spoke session protocol 3.

Method: that commit is built from git into build/older (once; ccache helps), and its daemon and its client run
as processes of their own against those of this tree: alone, one after the other on one pool, and under load
while the daemon is upgraded, killed and downgraded. Every block is compared byte for byte.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import tarfile
import threading
from functools import partial
from pathlib import Path

import pytest

import kvclient
from kvclient import Layout
from tests.conftest import ROOT
from tests.fault.children import eventually

OLDER = "8f3183f45522"  # protocols 2 and 3, tables of version 3 with 48 layouts
PARTS = ("CMakeLists.txt", "native", "proto", "kvstored", "kvclient", "pyproject.toml")
LAYOUT = Layout(2, 1, 32, "float16", 16)
# Puts blocks of its own and gets what it and others put, as long as it is told keys; a line of answer each.
CLIENT = """
import os, sys
import kvclient
from kvclient import Layout
assert not hasattr(kvclient.errors, "LayoutLost") or sys.argv[2] == "new", "the tree under test"
layout = Layout(2, 1, 32, "float16", 16)
try:
    client = kvclient.connect(dir=sys.argv[1], on_error="raise")
except kvclient.errors.KVClientError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit()
print("attached", flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    try:
        if word == "put":
            key = bytes.fromhex(rest[0])
            with client.create([key], client.register_layout(layout)) as writer:
                for at in range(2):
                    if writer.results[0] == "granted":
                        writer[0].layer(at)[:] = key[at]
            print(writer.results[0], flush=True)
        elif word == "get":
            key = bytes.fromhex(rest[0])
            with client.get([key]) as blocks:
                view = blocks[0]
                same = lambda at: set(view.layer(at).ravel().tolist()) == {key[at]}
                print("miss" if view is None else [same(at) for at in range(2)], flush=True)
    except kvclient.errors.KVClientError as error:
        print(type(error).__name__, error, flush=True)
"""
HIT = "[True, True]"
# Detached is a kind of Unavailable: a writer's, whose daemon went between its create and its seal.
EXPECTED = ("granted", HIT, "miss", "Unavailable", "Detached", "BlockLost")


@pytest.fixture(scope="session")
def older() -> Path:
    return built(OLDER)


def built(commit: str) -> Path:
    """The tree of that commit, built."""
    tree = ROOT / "build/older" / commit
    tree.mkdir(parents=True, exist_ok=True)
    with open(tree.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (tree / "built").exists():
            look = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
            if subprocess.run(look, cwd=ROOT, capture_output=True).returncode:
                pytest.skip(f"this clone has no commit {commit}: it is shallow")
            archive = subprocess.Popen(
                ["git", "archive", commit, *PARTS], cwd=ROOT, stdout=subprocess.PIPE
            )
            with tarfile.open(fileobj=archive.stdout, mode="r|") as files:
                files.extractall(tree, filter="data")
            assert archive.wait() == 0
            _build(tree)
            (tree / "built").touch()
    return tree


def _build(tree: Path) -> None:
    def run(*words: object) -> None:
        done = subprocess.run([str(word) for word in words], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    protos = sorted(proto.relative_to(tree) for proto in tree.glob("proto/**/*.proto"))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"]
    run(*protoc, "--python_out=.", "--grpc_python_out=.", *protos)
    cmake = Path(sys.executable).parent / "cmake"
    ninja = Path(sys.executable).parent / "ninja"
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if _has("ccache") else []
    run(
        cmake, "-S", ".", "-B", "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DKV_IN_TREE=ON",
        f"-DPython_EXECUTABLE={sys.executable}", *launcher,
    )  # fmt: skip
    run(cmake, "--build", "build", "-j2", "--target", "_core_daemon", "_core_client")
    for side, package in (("daemon", "kvstored"), ("client", "kvclient")):
        (module,) = (tree / "build" / side).glob("_core*.so")
        (tree / package / module.name).write_bytes(module.read_bytes())


def _has(program: str) -> bool:
    return any(os.access(Path(part) / program, os.X_OK) for part in os.environ["PATH"].split(":"))


class Client:
    """A client process of one tree or the other."""

    def __init__(self, tree: Path, directory: Path, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(directory), name], cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.attached = self._process.stdout.readline().strip()

    def ask(self, *words: str) -> str:
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def put(self) -> str:
        key = os.urandom(32).hex()
        answer = self.ask("put", key)
        assert answer == "granted", answer
        return key

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture
def client(older):
    """`client("old", daemon)`, `client("new", daemon)`."""
    with contextlib.ExitStack() as ends:

        def start(name: str, daemon) -> Client:
            child = Client(older if name == "old" else ROOT, daemon.dir, name)
            ends.callback(child.close)
            return child

        yield start


@pytest.fixture
def version(older):
    """`version(daemon, "old")`: what its next start runs."""

    def choose(daemon, name: str):
        daemon.command = ["env", "-C", str(older), f"PYTHONPATH={older}", sys.executable]
        if name == "new":
            daemon.command = [sys.executable]
        return daemon

    return choose


@pytest.fixture
def old_daemon(daemon, version):
    kvstored = daemon(memory="64MiB")
    kvstored.stop()
    version(kvstored, "old")
    kvstored.args.append("--fresh")
    kvstored.start()
    kvstored.args.remove("--fresh")
    return kvstored


@pytest.mark.slow
def test_an_old_client_on_a_new_daemon(daemon, client):
    kvstored = daemon(memory="64MiB")
    old, new = client("old", kvstored), client("new", kvstored)
    assert (old.attached, new.attached) == ("attached", "attached")
    keys = [old.put(), new.put()]
    for reader in (old, new):
        assert [reader.ask("get", key) for key in keys] == [HIT, HIT]
    kvstored.restart(kill=True)
    for reader in (old, new):
        assert [reader.ask("get", key) for key in keys] == [HIT, HIT]
    keys.append(old.put())
    assert new.ask("get", keys[-1]) == HIT


@pytest.mark.slow
def test_what_an_old_client_would_misread_is_refused_to_it_and_named(daemon, client):
    kvstored = daemon(memory="64MiB")
    old = client("old", kvstored)
    here = kvstored.connect()
    with pytest.raises(kvclient.errors.NoSpace, match=r"first 48 layouts.*an older version"):
        for number in range(49):
            here.register_layout(Layout(1, 1, 16, "float16", 2 + number))
    old.close()
    for number in range(49, 120):
        here.register_layout(Layout(1, 1, 16, "float16", 2 + number))
    late = client("old", kvstored)
    assert late.attached.startswith("IncompatibleVersion")
    assert "version 2 of the session protocol" in late.attached and "versions 4 to 5" in late.attached
    assert client("new", kvstored).attached == "attached"


@pytest.mark.slow
def test_a_new_client_on_an_old_daemon(old_daemon, client):
    old, new = client("old", old_daemon), client("new", old_daemon)
    assert new.attached == "attached"
    keys = [old.put(), new.put()]
    for reader in (old, new):
        assert [reader.ask("get", key) for key in keys] == [HIT, HIT]
    old_daemon.restart(kill=True)
    assert new.ask("get", keys[0]) == HIT
    assert old.ask("get", new.put()) == HIT


@pytest.mark.slow
def test_up_and_down_by_one_version_under_load(old_daemon, client, version):
    """A pool of the earlier daemon serves on, in both directions, while the daemon is replaced, by a signal
    and by a kill. While there is none, clients hear so and nothing else; no byte is ever wrong."""
    clients = [client(name, old_daemon) for name in ("old", "new", "old", "new")]
    stop, wrong, counts = threading.Event(), [], [0] * len(clients)

    def load(number: int) -> None:
        keys: list[str] = []
        while not stop.is_set():
            key = os.urandom(32).hex()
            answers = [clients[number].ask("put", key)]
            keys = [*keys[-20:], key]
            answers += [clients[number].ask("get", each) for each in keys]
            wrong.extend(each for each in answers if not each.startswith(EXPECTED))
            if answers[0] == "granted" and HIT in answers:
                counts[number] += 1
            else:
                stop.wait(0.01)  # between two daemons

    threads = [threading.Thread(target=load, args=(number,)) for number in range(len(clients))]
    for thread in threads:
        thread.start()
    try:
        for name, kill in (("new", False), ("old", False), ("new", True), ("old", True), ("new", False)):
            goes_on = partial(_grew, counts, list(counts))
            version(old_daemon, name).restart(kill=kill)
            eventually(goes_on, "every client goes on", 120)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert wrong == []
    assert old_daemon.log().count("adopted=True") == 5


def _grew(now: list[int], before: list[int]) -> bool:
    return all(count > was + 5 for count, was in zip(now, before, strict=True))

