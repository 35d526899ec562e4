"""`python -m tests.soak.hosts --minutes 2`: three hosts that share what they have, clients on all, and their
daemons killed, frozen and cut off from each other at random, as a seed says. Every byte that is handed out is
checked; at the end all must be back in service, and every byte given back.

Each way from a host to another leads through a proxy of ours, which swallows what passes while it is cut, as
a dropped packet does: nobody is told. Ends with 1 if a byte was wrong or leaked, or a host did not come back.

Owns the daemons, the proxies and the clients. Invariant: what it cannot explain is a problem it reports.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvclient.errors import InvalidArgument, KVClientError, LayoutLost
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys, pattern
from kvstored.v1 import admin_pb2
from tests.conformance.grpc_door import GrpcClient
from tests.conftest import BASE_NAME, Daemon, wait_for
from tests.descriptors import descriptors
from tests.hosts.hosts import Hosts, Proxy

HOSTS, CLIENTS_EACH = 3, 2
STEPS_A_ROUND = 15  # of each client that can be served, before the next harm
ROUND_S = 6.0  # and no longer: all may be frozen
BACK_S = 60.0
MOST_FILES_OPEN = 160  # of an idle daemon: 4 to 16 connections to each of two peers, and as many of theirs


class Worker(threading.Thread):
    """A client of one host: puts, gets, follows and deletes, and checks what it gets."""

    def __init__(self, soak: HostsSoak, host: int, seed: int) -> None:
        super().__init__(name=f"client of n{host}", daemon=True)
        self._soak, self._host, self._choose = soak, host, random.Random(seed)
        self.steps = 0

    def run(self) -> None:
        while not self._soak.over.is_set():
            try:
                with self._soak.hosts[self._host].connect() as client:
                    layouts = [client.register_layout(kind.to_blob()) for kind in (SMALL, BIG)]
                    while not self._soak.over.is_set():
                        self._step(client, layouts)
                        self.steps += 1
            except (KVClientError, OSError) as error:
                if isinstance(error, InvalidArgument) and not isinstance(error, LayoutLost):
                    self._soak.problems.append(f"{self.name}: {error!r}\n{traceback.format_exc()[-1500:]}")
                self._soak.met[type(error).__name__] += 1
                self._soak.over.wait(0.02)
            except BaseException as error:
                self._soak.problems.append(f"{self.name}: {error!r}")
                return

    def _step(self, client: Any, layouts: list[int]) -> None:
        kind = int(self._choose.random() < 0.15)
        keys = self._choose.sample(self._soak.keys[kind], self._choose.randint(1, 6))
        what = self._choose.random()
        if what < 0.35:
            self._put(client, keys, layouts[kind], (SMALL, BIG)[kind])
        elif what < 0.45:
            client.delete(keys)
        else:
            self._get(client, keys, (SMALL, BIG)[kind].num_layers)

    def _put(self, client: Any, keys: list[bytes], layout: int, kind: Any) -> None:
        gives_up = self._choose.random() < 0.1
        writer = client.create(keys, layout, priority=self._choose.randint(0, 100))
        try:
            for index in writer.granted:
                for layer in range(kind.num_layers):  # one after the other: somebody may follow
                    target = writer[index].layer(layer)
                    target[...] = pattern(writer[index].key, layer, target.shape)
                    if layer == 0:
                        writer[index].meta[:32] = writer[index].key
                    writer[index].mark_layer(layer)
                if not gives_up:
                    writer.seal(index)
                    self._soak.met["blocks put"] += 1
        finally:
            writer.abort()

    def _get(self, client: Any, keys: list[bytes], layers: int) -> None:
        follow = self._choose.random() < 0.3
        with client.get(keys, follow=follow, wait_s=self._choose.choice([0.0, 0.3, 2.0])) as blocks:
            for block in blocks:
                if block is None:
                    self._soak.met["misses"] += 1
                    continue
                block.wait_layer(layers - 1, timeout_s=5)
                check(block, layers) if block.sealed else self._check_layers(block, layers)
                self._soak.met["blocks checked"] += 1

    @staticmethod
    def _check_layers(block: Any, layers: int) -> None:
        for layer in range(layers):
            found = block.layer(layer)
            assert (found == pattern(block.key, layer, found.shape)).all(), f"wrong bytes in layer {layer}"


class HostsSoak:
    def __init__(self, seed: int, base: Path) -> None:
        self.choose = random.Random(seed)
        self.problems: list[str] = []
        self.met: Counter[str] = Counter()
        self.over = threading.Event()
        self.keys = [new_keys(60), new_keys(12)]
        self._base, self._frozen, self._dead = base, set[int](), set[int]()
        self.hosts = Hosts(self._daemon, base, HOSTS, memory="24MiB")
        pairs = itertools.permutations(range(HOSTS), 2)
        self.ways = {(i, k): Proxy(self.hosts.addresses[k]) for i, k in pairs}
        for (i, k), way in self.ways.items():
            self.hosts.reroute(i, k, way.address)
        self._workers = [
            Worker(self, i % HOSTS, seed * 100 + i) for i in range(HOSTS * CLIENTS_EACH)
        ]

    def _daemon(self, memory: str, args: list[str], start: bool) -> Daemon:
        directory = self._base / f"d{len(list(self._base.glob('d?')))}"
        directory.mkdir()
        return Daemon(directory, memory, (*args, "--log-level", "warning"), {})

    # ------------------------------------------------------------ harm

    def kill(self, host: int) -> None:
        self.hosts[host].kill()
        self._dead.add(host)
        self.met["daemons killed"] += 1

    def freeze(self, host: int) -> None:
        os.kill(self.hosts[host].pid, signal.SIGSTOP)
        self._frozen.add(host)
        self.met["daemons frozen"] += 1

    def cut_off(self, host: int) -> None:
        for (i, k), way in self.ways.items():
            if host in (i, k):
                way.cut.clear()
        self.met["hosts cut off"] += 1

    def cut_one_way(self, host: int) -> None:
        self.ways[host, (host + 1) % HOSTS].cut.clear()
        self.met["ways cut"] += 1

    def heal(self) -> None:
        for host in self._frozen:
            os.kill(self.hosts[host].pid, signal.SIGCONT)
        for way in self.ways.values():
            way.cut.set()
        for host in self._dead:
            self.hosts[host].start()
        self._frozen, self._dead = set(), set()

    # ------------------------------------------------------------ a run

    def run(self, rounds: int, minutes: float) -> None:
        self.hosts.start().wait_up(wait_for)
        for worker in self._workers:
            worker.start()
        end = time.monotonic() + minutes * 60
        while rounds > 0 or time.monotonic() < end:
            rounds -= 1
            for host in self.choose.sample(range(HOSTS), self.choose.choice([1, 1, 1, 2])):
                self.choose.choice([self.kill, self.freeze, self.cut_off, self.cut_one_way])(host)
            self._go_on()
            self.heal()
            self._go_on()
            self.met["rounds"] += 1
            if self.problems:
                break
        self._end()

    def _go_on(self) -> None:
        """Until every client whose daemon answers has done its part."""
        want = [worker.steps + STEPS_A_ROUND for worker in self._workers]
        end = time.monotonic() + ROUND_S
        away = self._frozen | self._dead

        def done() -> bool:
            there = (i for i in range(len(self._workers)) if i % HOSTS not in away)
            return time.monotonic() > end or all(self._workers[i].steps >= want[i] for i in there)

        wait_for(done, timeout_s=ROUND_S + 60)

    def _end(self) -> None:
        self.over.set()
        for worker in self._workers:
            worker.join(BACK_S)
            if worker.is_alive():
                self.problems.append(f"{worker.name} hangs")
        with self._noting("a host did not come back"):
            self.hosts.wait_up(wait_for)
            self._all_serve_all()
        for host in range(HOSTS):
            with self._noting(f"n{host} leaks"):
                self._account(host)

    @contextlib.contextmanager
    def _noting(self, what: str) -> Any:
        try:
            yield
        except Exception as error:
            self.problems.append(f"{what}: {error!r:.400}")

    def _all_serve_all(self) -> None:
        clients = [self.hosts[i].connect() for i in range(HOSTS)]
        for i, writer in enumerate(clients):
            keys = new_keys(3)
            with writer.create(keys, writer.register_layout(SMALL.to_blob())) as blocks:
                for block in blocks:
                    fill(block)
            self.keys[0] += keys
            for k, reader in enumerate(clients):
                if k == i:
                    continue
                self._heard(reader, keys, f"n{k} hears of n{i}")
                with reader.get(keys, wait_s=30) as found:
                    for block in found:
                        check(block)
        for client in clients:
            client.close()

    @staticmethod
    def _heard(reader: Any, keys: list[bytes], what: str) -> None:
        wait_for(lambda: reader.lookup(keys, peers=True).on_peers == len(keys), what)

    def _account(self, host: int) -> None:
        with self.hosts[host].connect() as client:
            client.delete([key for keys in self.keys for key in keys])
            wait_for(lambda: client.stats()["used_bytes"] == 0, "all memory is given back")
            stats = client.stats()
            assert stats["pins"] == stats["created"] == 0, stats
        with GrpcClient(str(self.hosts[host].dir / "grpc.sock")) as door:
            door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=30)
        count = len(descriptors(self.hosts[host].pid))
        assert count <= MOST_FILES_OPEN, f"{count} descriptors are open, {MOST_FILES_OPEN} at most"

    def close(self) -> None:
        self.over.set()
        self.heal()
        for host in range(HOSTS):
            with self._noting(f"the end of n{host}"):
                status = self.hosts[host].stop()
                assert status == 0, f"it ended with {status}\n{self.hosts[host].log()[-2000:]}"
            self.hosts[host].remove()
        for way in self.ways.values():
            way.close()


def soak(seed: int, rounds: int, minutes: float, say: Callable[[str], None] = print) -> int:
    """How many problems there were."""
    base = Path(tempfile.mkdtemp(prefix=BASE_NAME))
    chaos = HostsSoak(seed, base)
    try:
        chaos.run(rounds, minutes)
    finally:
        chaos.close()
        shutil.rmtree(base, ignore_errors=True)
    say(f"seed {seed}: " + ", ".join(f"{name} {count}" for name, count in sorted(chaos.met.items())))
    for problem in chaos.problems:
        say(f"PROBLEM {problem}")
    say(f"wrong or leaked: {len(chaos.problems)}")
    return len(chaos.problems)


def main() -> None:
    what = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.soak.hosts", description=what)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    told = parser.parse_args()
    sys.exit(soak(told.seed, told.rounds, told.minutes) > 0)


if __name__ == "__main__":
    main()
