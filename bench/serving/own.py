"""The rows that only this project has: another server's KV, a restart, a disk, two servers, no model, no
client.

Owns the processes of each row. Ratios are to the same server's cold time in the same row.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

from bench.serving.client import Answer, chat
from bench.serving.contenders import LOGS, Ours, free_port
from bench.serving.loads import LONG, Prompts, eight, tiny
from bench.serving.processes import Served

WATCH_S = 3.0


def shared_between_servers(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """Cold on one server, warm on another; then after both and the daemon were restarted."""
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        store = Ours(model, Path(home))
        store.start_daemon()
        try:
            with store.server() as first, store.server() as second:
                text = prompts.of(LONG, ("own", seed))
                cold = _asked(first, model, text)
                other = _asked(second, model, text)
            store.stop_daemon()
            store.start_daemon("--discard")
            with store.server() as third:
                again = _asked(third, model, text)
        finally:
            store.stop_daemon()
    return _ratios(cold, {"another_servers": other, "after_restart": again})


def from_disk(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """Cold, then on a server and a daemon that find the blocks on disk only."""
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        store = Ours(model, Path(home), disk=Path(home) / "disk")
        store.start_daemon()
        try:
            with store.server() as first:
                text = prompts.of(LONG, ("disk", seed))
                cold = _asked(first, model, text)
            store.stop_daemon()
            store.start_daemon("--fresh", "--discard")
            with store.server() as second:
                disk = _asked(second, model, text)
        finally:
            store.stop_daemon()
    return _ratios(cold, {"from_disk": disk})


def split_over_two(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """Load b on one server, and on two of the same daemon: CPU seconds of all servers together, tokens of
    prompts that each computed, and its passes.
    """
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        store = Ours(model, Path(home))
        store.start_daemon("--discard")
        try:
            with store.server() as first, store.server() as second:
                alone = _counted([first], model, prompts, (seed, "one"))
                two = _counted([first, second], model, prompts, (seed, "two"))
        finally:
            store.stop_daemon()
    return {"one": alone, "two": two, "cpu_ratio": two["cpu_s"] / alone["cpu_s"]}


def _counted(servers: list[Served], model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    before = [server.figures() for server in servers]
    out = eight(servers, model.name, prompts, seed, True)
    for name in ("prompt_tokens_computed_total", "steps_total"):
        out[name] = [server.figures().get(name, 0) - was.get(name, 0)
                     for server, was in zip(servers, before, strict=True)]  # fmt: skip
    return out


def at_once(model: Path, count: int = 1000) -> dict[str, Any]:
    """Without a model: CPU a request, and the rate."""
    port = free_port()
    command = [sys.executable, "-m", "bench.serving.instant", str(model), str(port)]
    with Served("instant", command, f"http://127.0.0.1:{port}", LOGS / "instant.log") as server:
        tiny(server, "instant", 8, 50)
        return {str(beside): tiny(server, "instant", beside, count) for beside in (1, 8)}


def hang_up(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """What a server still computes once the client of a long answer is gone: CPU seconds of the three seconds
    after, those of three idle seconds taken off. Streamed, after a few tokens; whole, after a second.
    """
    out = {}
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        store = Ours(model, Path(home))
        store.start_daemon("--discard")
        try:
            with store.server() as server:
                chat(server.url, model.name, "Hi", 4)
                idle = _cpu_of(server, WATCH_S)
                for name, stream in (("streamed", True), ("whole", False)):
                    leave(server.url, model.name, prompts.of(64, ("gone", seed, name)), stream)
                    out[f"{name}_cpu_s"] = _cpu_of(server, WATCH_S) - idle
        finally:
            store.stop_daemon()
    return out


def leave(url: str, model: str, text: str, stream: bool) -> None:
    """Asks for a long answer and hangs up in the middle of it."""
    where = urllib.parse.urlsplit(url)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2000,
            "ignore_eos": True, "stream": stream}  # fmt: skip
    with contextlib.closing(http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)) as way:
        way.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        if stream:
            answer = way.getresponse()
            for _ in range(12):
                answer.readline()
        else:
            time.sleep(1.0)


def _cpu_of(server: Served, seconds: float) -> float:
    before = server.cpu_s()
    time.sleep(seconds)
    return server.cpu_s() - before


def _asked(server: Served, model: Path, text: str) -> Answer:
    said = chat(server.url, model.name, text, 8)
    if said.status != 200:
        raise RuntimeError(f"status {said.status}: {said.error}")
    return said


def _ratios(cold: Answer, others: dict[str, Answer]) -> dict[str, Any]:
    out: dict[str, Any] = {"cold_ttft_s": cold.ttft_s}
    for name, said in others.items():
        out[name] = {"ttft_s": said.ttft_s, "over_cold": said.ttft_s / cold.ttft_s, "cached": said.cached}
    return out
