"""A binary upgrade under load: `python examples/upgrade_demo.py [--clients N] [--upgrades N] [--kill]`.

Clients create, read and verify blocks without a pause while the daemon is replaced by another build of
itself, several times. Prints the longest pause each client saw, for reading and for writing. The exit status
is 0 only if no client saw an error, a wrong byte or a lost block, and each new daemon served with the blocks
of the old one within --limit-s of its end. Needs no model; ends everything it started.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

START_TIMEOUT_S, END_TIMEOUT_S, LOOK_S = 30.0, 60.0, 0.1
WRITES_BETWEEN = 100  # of each client before, between and after the upgrades: about a second
STEP_S = 0.002  # a client's pause: two processors have to serve everybody here
KNOWN_BLOCKS, READ_AT_ONCE, WRITE_AT_ONCE = 64, 4, 2


# ---- a client


def work(directory: str) -> dict[str, float]:
    """Reads and writes until standard input ends, and says when it has written as often as a line of it asks.
    Every block it has sealed must be found, with its bytes."""
    import kvclient
    from kvclient.errors import DeadlineExceeded, Detached, Unavailable
    from kvclient.testing.conformance.case import SMALL, check, fill, new_keys

    no_daemon = (Unavailable, Detached, DeadlineExceeded)
    seen: dict[str, float] = dict.fromkeys(("reads", "writes", "refused", "wrong", "lost"), 0)
    seen.update(read_gap_s=0.0, write_gap_s=0.0)
    with kvclient.connect(dir=directory) as client:
        layout = client.register_layout(SMALL.to_blob())
        known: list[bytes] = []
        last = {"read": time.monotonic(), "write": time.monotonic()}

        def succeeded(what: str) -> None:
            now = time.monotonic()
            seen[f"{what}s"] += 1
            seen[f"{what}_gap_s"] = max(seen[f"{what}_gap_s"], now - last[what])
            last[what] = now

        print("ready", flush=True)
        asked = 0
        while True:
            if select.select([sys.stdin], [], [], STEP_S)[0]:
                if not (line := sys.stdin.readline()):
                    break
                asked = seen["writes"] + int(line)
            if 0 < asked <= seen["writes"]:
                print("written", flush=True)
                asked = 0
            keys = new_keys(WRITE_AT_ONCE)
            try:
                with client.create(keys, layout) as writer:
                    for index in writer.granted:
                        fill(writer[index])
                    whole = len(writer.granted) == len(keys)
                if whole:  # granted and sealed
                    succeeded("write")
                    known += keys
                if len(known) > KNOWN_BLOCKS:
                    client.delete(known[:WRITE_AT_ONCE])
                    del known[:WRITE_AT_ONCE]
            except no_daemon:  # who writes needs one; reading, below, goes on without
                seen["refused"] += 1
            some = random.sample(known, min(READ_AT_ONCE, len(known)))
            if some and read(client, some, check, seen):
                succeeded("read")
        seen["reattached"] = client.reattached_total
    return seen


def read(client, keys: list[bytes], check, seen: dict[str, float]) -> bool:
    """Whether all were found: also while there is no daemon, and without an error."""
    with client.get(keys) as blocks:
        missing = sum(block is None for block in blocks)
        seen["lost"] += missing
        for block in filter(None, blocks):
            try:
                check(block)
            except AssertionError:
                seen["wrong"] += 1
    return not missing


# ---- the daemons


def another_build(home: pathlib.Path, version: str) -> pathlib.Path:
    """A copy of the daemon's package that calls itself by this version, as an installation would be."""
    tree = home / version
    here = importlib.util.find_spec("kvstored")  # the one that this Python has installed
    assert here is not None and here.origin is not None
    source = pathlib.Path(here.origin).parent
    shutil.copytree(source, tree / "kvstored", ignore=shutil.ignore_patterns("__pycache__"))
    init = tree / "kvstored" / "__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', init.read_text()))
    compileall.compile_dir(tree, quiet=2)  # as pip does; the first start would pay for it
    return tree


def start_daemon(home: pathlib.Path, tree: pathlib.Path) -> subprocess.Popen[bytes]:
    """Returns when it is ready. Raises SystemExit with what it said if it ends before that."""
    path = str(home / "notify")
    pathlib.Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, open(home / "log", "ab") as log:
        ready.bind(path)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstored", "serve", "--dir", str(home / "run"), "--memory", "64MiB"],
            cwd=tree, stderr=log, env={**os.environ, "PYTHONPATH": str(tree), "NOTIFY_SOCKET": path},
        )  # fmt: skip
        end_s = time.monotonic() + START_TIMEOUT_S
        ready.settimeout(LOOK_S)
        while True:
            with contextlib.suppress(TimeoutError):
                if ready.recv(4096).startswith(b"READY=1"):
                    return process
            if process.poll() is not None or time.monotonic() > end_s:
                said = (home / "log").read_text(errors="replace")
                raise SystemExit(f"the daemon did not start within {START_TIMEOUT_S:.0f} s. It said:\n{said}")


def upgrade(home: pathlib.Path, old: subprocess.Popen[bytes], tree: pathlib.Path, kill: bool):
    """The new daemon, and how long there was none."""
    old.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
    old.wait(END_TIMEOUT_S)
    ended = time.monotonic()
    new = start_daemon(home, tree)
    return new, time.monotonic() - ended


def status(home: pathlib.Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "kvstored", "status", "--json", "--dir", str(home / "run")],
        cwd=home, capture_output=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


# ---- the demo


def start_client(home: pathlib.Path) -> subprocess.Popen[str]:
    client = subprocess.Popen(
        [sys.executable, __file__, "--work", str(home / "run")], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    if client.stdout.readline() != "ready\n":
        raise SystemExit("a client did not start")
    return client


def load(clients: list[subprocess.Popen[str]]) -> None:
    """Returns when each client has written so often again."""
    for client in clients:
        client.stdin.write(f"{WRITES_BETWEEN}\n")
        client.stdin.flush()
    for client in clients:
        if not select.select([client.stdout], [], [], END_TIMEOUT_S)[0]:
            raise SystemExit(f"a client has not written {WRITES_BETWEEN} times within {END_TIMEOUT_S:.0f} s")
        client.stdout.readline()  # or it has ended, which tell() reports


def run(home: pathlib.Path, chosen: argparse.Namespace) -> list[str]:
    """What was not as expected."""
    wrong: list[str] = []
    builds = [another_build(home, f"1.0.{number}") for number in range(chosen.upgrades + 1)]
    daemon = start_daemon(home, builds[0])
    clients: list[subprocess.Popen[str]] = []
    try:
        clients += [start_client(home) for _ in range(chosen.clients)]
        for build in builds[1:]:
            load(clients)
            before = status(home)
            daemon, down_s = upgrade(home, daemon, build, chosen.kill)
            after = status(home)
            adopted = all(namespace["adopted"] for namespace in after["namespaces"])
            print(
                f"{before['version']} -> {after['version']}: no daemon for {down_s * 1000:.0f} ms, "
                + ("blocks kept" if adopted else "BLOCKS LOST")
            )
            if not adopted:
                wrong.append(f"the daemon {build.name} started without the blocks of {before['version']}")
            if after["version"] != build.name:
                wrong.append(f"version {after['version']} answers, not {build.name}")
            if down_s > chosen.limit_s:
                limit = f"the limit is {chosen.limit_s:g} s (--limit-s)"
                wrong.append(f"there was no daemon for {down_s:.2f} s; {limit}")
        load(clients)
        for number, client in enumerate(clients):
            said, _ = client.communicate(timeout=END_TIMEOUT_S)
            wrong += tell(number, client.returncode, said)
    finally:
        for process in (*clients, daemon):
            if process.poll() is None:
                process.kill()
                process.wait()
        leave_nothing(home)
    return wrong


def tell(number: int, code: int, said: str) -> list[str]:
    """Prints what a client saw. What of it was not as expected."""
    if code != 0:
        return [f"client {number} ended with {code}: an error reached the caller"]
    seen = json.loads(said)
    print(
        f"client {number}: {seen['reads']} reads, longest pause {seen['read_gap_s'] * 1000:.0f} ms; "
        f"{seen['writes']} writes, longest pause {seen['write_gap_s'] * 1000:.0f} ms; "
        f"errors 0, wrong bytes {seen['wrong']}, lost blocks {seen['lost']}; "
        f"{seen['refused']} writes without a daemon, attached anew {seen['reattached']} times"
    )
    found = {"wrong bytes": seen["wrong"], "lost blocks": seen["lost"]}
    wrong = [f"client {number} saw {count} {what}" for what, count in found.items() if count]
    return wrong + [f"client {number} has no {what}" for what in ("reads", "writes") if not seen[what]]


def leave_nothing(home: pathlib.Path) -> None:
    """The last daemon was killed: its memory is there for a next one that will not come."""
    for prefix in set(re.findall(r"kvstored-[0-9a-f]+-\d+", (home / "run" / "state.json").read_text())):
        for path in pathlib.Path("/dev/shm").glob(prefix + ".*"):
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--upgrades", type=int, default=3)
    parser.add_argument("--kill", action="store_true", help="SIGKILL instead of SIGTERM")
    parser.add_argument("--work", metavar="DIR", help=argparse.SUPPRESS)  # what a client process runs
    parser.add_argument(
        "--limit-s", type=float, default=10.0, metavar="SECONDS",
        help="longest time without a daemon; default 10, a quiet machine needs 0.2",
    )  # fmt: skip
    chosen = parser.parse_args()
    if chosen.work:
        print(json.dumps(work(chosen.work)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstored-upgrade-") as home:
        wrong = run(pathlib.Path(home), chosen)
    for fault in wrong:
        print(f"NOT AS EXPECTED: {fault}")
    print("" if wrong else "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
