"""`python -m tests.soak --minutes 5`: breaks everything that can be broken under load, and checks every byte.

Several clients with blocks of three models, a pool and a disk far too small for them; clients and the daemon
are killed at random, files are harmed, the file system fails on a schedule, power is lost. Every so often all
stop, and every byte must be accounted for. Ends with 1 if a byte was wrong or leaked, or anything happened
that no document allows.

Owns the daemon, its directories and the clients. Invariant: what it cannot explain is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.conftest import Daemon, DaemonFailed
from tests.soak.client import SoakClient, rest
from tests.soak.harm import a_schedule, harm_a_file
from tests.soak.truth import Count, Ledger, Universe

CLIENTS = 4
KEYS_PER_KIND = (48, 16, 8)  # of each model: shared, and of each client private and short-lived
MEMORY, QUOTA = "24MiB", "48MiB"
PROGRESS_S = 5.0
ACCOUNT_S = 30.0
PATIENCE_S = 300.0  # with a daemon that shares its processors with all: a start took over 60 at a load of 77


class Soak:
    def __init__(self, seed: int, base: Path, clients: int = CLIENTS) -> None:
        self.choose = random.Random(seed)
        self.base = base
        self.places = clients
        self.universe = Universe(seed, clients, KEYS_PER_KIND)
        self.ledger = Ledger(clients, len(self.universe.keys))
        self.survived: Counter[str] = Counter()
        self.problems: list[str] = []
        self.leaked_bytes = 0
        self.disk = base / "disk"
        (base / "run").mkdir(mode=0o755)
        flags = ("--disk", str(self.disk), "--disk-quota", QUOTA, "--disk-write-priority", "60")
        self.daemon = Daemon(base / "run", MEMORY, (*flags, "--log-level", "warning"), {})
        self.report = os.open(base / "report", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.clients: dict[int, int] = {}  # place -> pid

    # ------------------------------------------------------------ clients

    def start_clients(self) -> None:
        for place in range(self.places):
            if place not in self.clients:
                self.clients[place] = self._fork(place)

    def _fork(self, place: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            SoakClient(str(self.daemon.dir), self.universe, self.ledger, place, self.report).run()
        except BaseException as error:
            os.write(self.report, f"client {place} ended: {error!r}\n".encode())
        finally:
            os._exit(status)

    def kill_client(self, place: int, number: int = signal.SIGKILL) -> None:
        pid = self.clients.pop(place)
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            self.problems.append(f"client {place} had ended by itself")

    # ------------------------------------------------------------ the daemon

    def end_daemon(self) -> None:
        """By itself (a schedule), by SIGKILL, or in order."""
        assert self.daemon.process is not None
        if self.daemon.process.poll() is not None:
            self.survived["daemon deaths in the middle of a step"] += 1
            if self.daemon.process.returncode != -signal.SIGKILL:
                status, schedule = self.daemon.process.returncode, self.daemon.env["KVSTORED_FAULTS"]
                self.problems.append(
                    f"the daemon ended with {status} ({schedule})\n{self.daemon.log()[-2000:]}"
                )
        elif self.choose.random() < 0.7:
            self.daemon.kill()
            self.survived["daemons killed"] += 1
        else:
            self.stop_in_order()
            self.survived["daemons stopped"] += 1

    def stop_in_order(self) -> None:
        try:
            status = self.daemon.stop(PATIENCE_S)
        except DaemonFailed as error:
            self.problems.append(str(error)[-3000:])
            return
        if status not in (0, -signal.SIGKILL):  # a schedule may be quicker
            self.problems.append(f"the daemon ended with {status} after SIGTERM")

    def start_daemon(self, schedule: str = "") -> None:
        """Often killed while it starts; sometimes without the memory of the one before."""
        power_lost = "power_loss" in self.daemon.env.get("KVSTORED_FAULTS", "")
        if power_lost or self.choose.random() < 0.1:
            self.lose_memory()
            self.ledger.forget_deletions()
        self.daemon.env["KVSTORED_FAULTS"] = schedule
        while self.choose.random() < 0.3:
            with contextlib.suppress(DaemonFailed):
                self.daemon.start(timeout_s=self.choose.random() * 0.4)  # it is killed at this deadline
                self.daemon.kill()
            self.survived["daemons killed while starting"] += 1
        for _ in range(5):
            try:
                self.daemon.start(PATIENCE_S)
                return
            except DaemonFailed as error:
                assert self.daemon.process is not None
                if not schedule or self.daemon.process.returncode != -signal.SIGKILL:
                    self.problems.append(str(error)[-3000:])
                    return
        self.daemon.env["KVSTORED_FAULTS"] = ""
        self.daemon.start(PATIENCE_S)

    def lose_memory(self) -> None:
        self.daemon._note_segments()
        for prefix in self.daemon._prefixes:
            for segment in Path("/dev/shm").glob(prefix + "*"):
                segment.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.daemon.dir / "state.json").unlink()
        self.survived["memory lost"] += 1

    # ------------------------------------------------------------ the hour

    def run(self, seconds: float) -> None:
        self.daemon.start(PATIENCE_S)
        self.start_clients()
        begun = time.monotonic()
        next_progress, next_account = begun + PROGRESS_S, begun + ACCOUNT_S
        next_death = begun + 2.0
        while (now := time.monotonic()) < begun + seconds and not self.problems:
            rest(self.choose.random() * 0.3)
            assert self.daemon.process is not None
            if now > next_death or self.daemon.process.poll() is not None:
                self.end_daemon()
                self.start_daemon(a_schedule(self.choose))
                next_death = time.monotonic() + self.choose.uniform(0.5, 8.0)
            if self.choose.random() < 0.3:
                self.kill_client(self.choose.randrange(self.places))
                self.survived["clients killed"] += 1
                self.start_clients()
            if self.choose.random() < 0.6 and harm_a_file(self.disk / "default", self.choose):
                self.survived["files harmed"] += 1
            if now > next_progress:
                self.tell(now - begun)
                next_progress = now + PROGRESS_S
            if now > next_account:
                self.settle_accounts()
                self.start_clients()
                next_account = time.monotonic() + ACCOUNT_S
        self.settle_accounts()
        self.tell(time.monotonic() - begun)

    def settle_accounts(self) -> None:
        """Everybody stops; every byte of memory and disk has a block, and all of it can be given back."""
        for place in list(self.clients):
            self.kill_client(place, self.choose.choice([signal.SIGKILL, signal.SIGTERM]))
        assert self.daemon.process is not None
        if self.daemon.env.get("KVSTORED_FAULTS") or self.daemon.process.poll() is not None:
            self.end_daemon()
            self.start_daemon()
        command = [sys.executable, "-m", "tests.soak.account", self.daemon.dir, self.disk]
        about = [str(self.universe.seed), str(self.places), json.dumps(KEYS_PER_KIND)]
        done = subprocess.run([*command, *about], capture_output=True, text=True)
        if done.returncode:
            self.problems.append(f"{done.stderr[-3000:]}\n{self.daemon.log()[-3000:]}")
        else:
            found = json.loads(done.stdout)
            self.leaked_bytes += found["leaked_bytes"]
            self.problems += found["problems"]
        self.survived["accounts settled"] += 1

    def tell(self, seconds: float) -> None:
        total = self.ledger.total
        parts = [
            f"{seconds:6.0f} s  {total(Count.operations):,} operations",
            f"put {total(Count.put_bytes) >> 20:,} MiB",
            f"read {total(Count.hit_bytes) >> 20:,} MiB",
            f"{total(Count.layers_followed):,} layers followed",
            f"{sum(self.survived.values()):,} faults survived",
            f"wrong {total(Count.wrong)}",
            f"came back {total(Count.came_back)}",
            f"unexpected {total(Count.unexpected)}",
            f"leaked {self.leaked_bytes}",
        ]
        print(", ".join(parts), flush=True)

    def verdict(self) -> int:
        for fault, count in sorted(self.survived.items()):
            print(f"    {count:8,}  {fault}")
        for count in Count:
            print(f"    {self.ledger.total(count):14,}  {count.name}")
        said = (self.base / "report").read_text()
        print(said[:8000], end="")
        for problem in self.problems:
            print(f"PROBLEM: {problem}")
        bad = [self.ledger.total(count) for count in (Count.wrong, Count.came_back, Count.unexpected)]
        print(f"wrong bytes: {bad[0]}    leaked bytes: {self.leaked_bytes}")
        return int(any(bad) or bool(self.leaked_bytes) or bool(self.problems))

    def close(self) -> None:
        for place in list(self.clients):
            with contextlib.suppress(OSError):
                self.kill_client(place)
        with contextlib.suppress(DaemonFailed):
            self.daemon.stop()
        self.daemon.remove()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n\n")[1])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=CLIENTS, help="processes (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    chosen = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="kvstored-soak-", dir="/var/tmp"))
    print(f"seed {chosen.seed}, {chosen.clients} clients, {chosen.minutes:g} minutes, in {base}", flush=True)
    soak = Soak(chosen.seed, base, chosen.clients)
    try:
        soak.run(chosen.minutes * 60)
    finally:
        soak.close()
        status = soak.verdict()
        if not status:
            shutil.rmtree(base, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
