"""Blocks between hosts, beside a raw Python stream into memory: wall time and processor time.

    python -m bench.hosts [--rounds 7] [--only NAME ...] [--beside mooncake] [--beside nixl] [--json FILE]

Daemons are on addresses of loopback, each a process. Ours and the raw stream take turns within one run, so a
machine that drifts drifts for both; what is compared are medians of rounds. Loopback is copies and system
calls: it says what the software costs, and nothing about a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvclient
from bench import machine
from bench.hosts import apart, contenders, pool
from bench.hosts.pool import cpu_s
from bench.hosts.raw_stream import Raw
from kvclient.blocks.layout import Layout
from kvclient.errors import BlockLost, Detached, Unavailable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import hosts_here

MIB = 1 << 20
SIZES = {"1 MiB": 8, "8 MiB": 64, "64 MiB": 512}  # tokens of 128 KiB, in 32 layers
LEAST_S = 0.2  # of one round of one side: what is shorter is repeated
UP_S, WAIT_S = 60.0, 60.0
PEERS = 8
IDLE_S = 10.0


def us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def wait_up(host: hosts_here.Host) -> None:
    end = time.monotonic() + UP_S
    while not all(peer["state"] == "up" for peer in host.peers().values()):
        if time.monotonic() > end:
            raise SystemExit(f"{host.name} does not reach its peers: {host.peers()}")
        time.sleep(0.05)


def layout(layers: int, heads: int, dim: int, tokens: int) -> Layout:
    return Layout(
        num_layers=layers, kv_per_layer=2, num_kv_heads=heads, head_dim=dim, dtype="float16",
        block_tokens=tokens,
    )  # fmt: skip


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def put(client: Any, keys: list[bytes], made: Layout) -> None:
    with client.create(keys, client.register_layout(made)) as writer:
        for block in writer:
            for layer in range(made.num_layers):
                block.layer(layer)[...] = 1


class Turns:
    """Ours and others in turns: seconds of wall and of processor time per call, a list of rounds each."""

    def __init__(self, rounds: int, pids: dict[str, list[int]]) -> None:
        self._rounds, self._pids = rounds, pids
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def run(self, sides: dict[str, tuple[Callable[[], None], Callable[[], None]]]) -> None:
        """By name: what is done before each call, untimed, and the call."""
        calls = {}
        for name, (before, call) in sides.items():  # a trial, also to warm up
            before()
            began = time.perf_counter()
            call()
            calls[name] = max(3, min(2000, int(LEAST_S / (time.perf_counter() - began))))
        for _ in range(self._rounds):
            for name, (before, call) in sides.items():
                wall, cpu = [], 0.0
                for _ in range(calls[name]):
                    before()
                    spent = -self._spent(name)
                    began = time.perf_counter()
                    call()
                    wall.append(time.perf_counter() - began)
                    cpu += spent + self._spent(name)
                self.wall.setdefault(name, []).append(statistics.median(wall))
                self.cpu.setdefault(name, []).append(cpu / calls[name])

    def _spent(self, name: str) -> float:
        return time.process_time() + sum(map(cpu_s, self._pids.get(name, ())))

    def row(self, what: str, reach: str, against: str) -> dict[str, Any]:
        wall = {name: us(statistics.median(rounds)) for name, rounds in self.wall.items()}
        cpu = {name: us(statistics.median(rounds)) for name, rounds in self.cpu.items()}
        return {
            "what": what, "reach": reach, "us": wall, "cpu_us": cpu, "against": against,
            "ratio": round(wall[against] / wall["ours"], 3),
            "cpu_ratio": round(cpu[against] / cpu["ours"], 3),
            "rounds": {name: list(map(us, rounds)) for name, rounds in self.wall.items()},
        }  # fmt: skip


@contextmanager
def pair(tls: bool) -> Iterator[tuple[dict[str, hosts_here.Host], Any, Any, Raw]]:
    """(hosts a and b, a client of each, raw streams)"""
    with hosts_here.running("a", "b", memory="640MiB", tls=tls, isolated=False) as hosts:
        wait_up(hosts["b"])
        directory = hosts["a"].dir.parent / "tls"
        files = tuple(str(directory / file) for file in ("a.pem", "a.key", "ca.pem"))
        raw = Raw("127.0.0.1", files if tls else None)  # type: ignore[arg-type]
        try:
            clients = [kvclient.connect(dir=str(host.dir)) for host in hosts.values()]
            with clients[0] as first, clients[1] as second:
                yield hosts, first, second, raw
        finally:
            raw.close()


def transfers(rounds: int, tls: bool, beside: list[str]) -> Iterator[dict[str, Any]]:
    kind, reach = ("raw TLS", "0.85 x") if tls else ("raw TCP", "0.9 x")
    with contextlib.ExitStack() as stack:
        hosts, first, second, raw = stack.enter_context(pair(tls))
        pids = [host.daemon.pid for host in hosts.values() if host.daemon]
        others = {name: contenders.Contender(name) for name in beside}  # which have no TLS
        for other in others.values():
            stack.callback(other.close)
        sides = {"ours": pids, "raw": [raw.pid], "raw of four": [raw.pid]}
        sides |= {name: [other.pid] for name, other in others.items()}
        for name, tokens in SIZES.items():
            made, keys = layout(32, 8, 128, tokens), new_keys(1)
            count = made.block_bytes()
            put(first, keys, made)
            turns = Turns(rounds, sides)
            turns.run({
                "ours": (lambda k=keys: second.delete(k), lambda k=keys: got(second, k)),
                "raw": (nothing, lambda n=count: raw.fetch(n)),
                "raw of four": (nothing, lambda n=count: raw.fetch(n, 4)),
                **{name: (nothing, lambda o=other, n=count: o.fetch(1, n)) for name, other in others.items()},
            })  # fmt: skip
            yield turns.row(f"one block of {name}, {kind[4:]}", f">= {reach} {kind}", "raw")
            for client in (first, second):
                client.delete(keys)
        made, keys = layout(4, 1, 64, 4), new_keys(64)
        put(first, keys, made)
        turns = Turns(rounds, sides)
        turns.run({
            "ours": (lambda: second.delete(keys), lambda: got(second, keys)),
            "raw": (nothing, lambda: raw.fetch(64 * 4096)),
            **{name: (nothing, lambda o=other: o.fetch(64, 4096)) for name, other in others.items()},
        })  # fmt: skip
        yield turns.row(f"64 blocks of 4 KiB in one batch, {kind[4:]}", "" if tls else "<= 300 us", "raw")


def nothing() -> None:
    pass


def got(client: Any, keys: list[bytes]) -> None:
    with client.get(keys, wait_s=WAIT_S) as blocks:
        if any(block is None for block in blocks):
            raise SystemExit("a block that the other host has was not fetched")


def first_layer(rounds: int) -> Iterator[dict[str, Any]]:
    """From a writer's mark to a reader's wait on the other host, of 32 KiB."""
    made, took = layout(32, 8, 128, 8), []
    with pair(False) as (_, first, second, raw):
        layout_id, turns = first.register_layout(made), 10 * rounds
        for _ in range(turns):
            keys, seen = new_keys(1), []
            with first.create(keys, layout_id) as writer:
                thread = threading.Thread(target=follow, args=(second, keys, seen))
                thread.start()
                for layer in range(made.num_layers):
                    writer[0].layer(layer)[...] = 1
                time.sleep(0.02)  # until it waits
                began = time.perf_counter()
                writer[0].mark_layer(0)
                thread.join()
                took.append(seen[0] - began)
        raw_s = []
        for _ in range(turns):
            began = time.perf_counter()
            raw.fetch(32 << 10)
            raw_s.append(time.perf_counter() - began)
    yield {
        "what": "first layer usable on the other host after its writer marked it (32 KiB)",
        "reach": "<= 1 ms + its transfer",
        "us": {"ours": us(statistics.median(took)), "raw": us(statistics.median(raw_s))},
    }


def follow(client: Any, keys: list[bytes], seen: list[float]) -> None:
    with client.get(keys, follow=True, wait_s=WAIT_S) as blocks, contextlib.suppress(BlockLost):
        if blocks[0] is not None:
            blocks[0].wait_layer(0, timeout_s=WAIT_S)
    seen.append(time.perf_counter())


@contextmanager
def two_hosts(isolated: bool) -> Iterator[tuple[dict[str, hosts_here.Host], Any, Any]]:
    with hosts_here.running("a", "b", memory="64MiB", tls=False, isolated=isolated) as hosts:
        wait_up(hosts["b"])
        clients = [kvclient.connect(dir=str(host.dir)) for host in hosts.values()]
        with clients[0] as first, clients[1] as second:
            yield hosts, first, second


FATES: dict[str, Callable[[hosts_here.Host], None]] = {
    "killed": lambda host: host.kill(),
    "frozen": lambda host: host.freeze(),
    "cut off": lambda host: host.network.cut_off(host.name),
}


def failures(rounds: int) -> Iterator[dict[str, Any]]:
    """A get waits for a block that the other host computes, which dies, stands still or is cut off then."""
    made = layout(32, 8, 128, 8)
    for fate, reach in (("killed", "<= 0.5 s"), ("frozen", "<= 2 s"), ("cut off", "<= 2 s")):
        took = []
        for _ in range(min(rounds, 3)):
            with two_hosts(fate == "cut off") as (hosts, first, second):
                if fate == "cut off" and not hosts["a"].network.isolated:
                    print(f"cut off: not measured, {hosts['a'].network.why}")
                    return
                keys, seen = new_keys(1), []
                gone = contextlib.suppress(Detached, Unavailable)  # the writer's own daemon is killed
                second.register_layout(made)
                with gone, first.create(keys, first.register_layout(made)) as writer:
                    thread = threading.Thread(target=follow, args=(second, keys, seen))
                    thread.start()
                    time.sleep(0.2)
                    began = time.perf_counter()
                    FATES[fate](hosts["a"])
                    thread.join()
                    took.append(seen[0] - began)
                    hosts["a"].thaw() if fate == "frozen" else None
                    hosts["a"].network.join_again("a") if fate == "cut off" else None
                    writer.abort()
        yield {"what": f"peer {fate}: a waiting get answers", "reach": reach,
               "us": {"ours": round(max(took) * 1e6)}}  # fmt: skip


def many(rounds: int) -> Iterator[dict[str, Any]]:
    """One daemon with eight peers, and one with none."""
    names = [f"h{i}" for i in range(PEERS + 1)]
    with (
        hosts_here.running(*names, memory="64MiB", tls=False, isolated=False) as hosts,
        hosts_here.running("alone", memory="64MiB", tls=False, isolated=False) as alone,
    ):
        wait_up(hosts["h0"])
        made, keys = layout(4, 1, 64, 4), new_keys(64)
        known, lone = (kvclient.connect(dir=str(host.dir)) for host in (hosts["h0"], alone["alone"]))
        with known, lone:
            for client in (known, lone):
                put(client, keys, made)
            turns = Turns(rounds, {})
            alone_too = {"without peers": (nothing, lambda: lone.lookup(keys))}
            turns.run({"ours": (nothing, lambda: known.lookup(keys)), **alone_too})
            what = f"look-up of 64 keys with {PEERS} peers, all local"
            yield turns.row(what, "<= 1.1 x without", "without peers")
        daemon = hosts["h0"].daemon
        assert daemon
        began, spent = time.monotonic(), cpu_s(daemon.pid)
        time.sleep(IDLE_S)
        share = (cpu_s(daemon.pid) - spent) / (time.monotonic() - began)
        yield {"what": f"idle daemon with {PEERS} peers", "reach": "<= 1 % of a core", "us": {},
               "percent_of_a_core": round(100 * share, 2)}  # fmt: skip


PARTS: dict[str, Callable[[int, list[str]], Iterator[dict[str, Any]]]] = {
    "tcp": lambda rounds, beside: transfers(rounds, False, beside),
    "tls": lambda rounds, beside: transfers(rounds, True, []),
    "first": lambda rounds, beside: first_layer(rounds),
    "failures": lambda rounds, beside: failures(rounds),
    "many": lambda rounds, beside: many(rounds),
    "apart": lambda rounds, beside: apart.rows(rounds),
    "pool": lambda rounds, beside: pool.rows(rounds),
}


def show(row: dict[str, Any]) -> None:
    times = ", ".join(f"{name} {us:,.0f} us" for name, us in row["us"].items())
    ratio = f"; {row['ratio']:.2f} x {row['against']}" if "ratio" in row else ""
    cpu = ""
    if "cpu_us" in row:
        spent = ", ".join(f"{name} {us:,.0f}" for name, us in row["cpu_us"].items())
        cpu = f"; processor time {spent} us, {row['cpu_ratio']:.2f} x"
    idle = f"{row['percent_of_a_core']} % of a core" if "percent_of_a_core" in row else ""
    if "percent_of_the_transfer" in row:
        idle = f"; {row['percent_of_the_transfer']} % of the transfer's time"
    if "failed" in row:
        idle = f", {row['failed']} failed"
    print(f"{row['what']:64} {times}{ratio}{cpu}{idle}   (reach {row['reach'] or '-'})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="may be given several times")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    others = list(contenders.PLACES)
    parser.add_argument("--beside", action="append", choices=others, help="over TCP, in turns with ours")
    chosen = parser.parse_args()
    if chosen.beside and "UCX_TLS" not in os.environ:  # only a process that starts finds their libraries
        words = [sys.executable, "-m", "bench.hosts", *sys.argv[1:]]
        os.execve(sys.executable, words, contenders.environment())
    about = machine.describe()
    print(machine.sentence(about), flush=True)
    rows = []
    for name in chosen.only or PARTS:
        for row in PARTS[name](chosen.rounds, chosen.beside or []):
            show(row)
            rows.append(row)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
