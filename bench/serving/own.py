"""The rows that only this project has: another server's KV, a restart, a disk, two servers, no model.

Owns the processes of each row. Ratios are to the same server's cold time in the same row.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.serving.client import Answer, chat
from bench.serving.contenders import LOGS, Ours, free_port
from bench.serving.loads import LONG, Prompts, eight, tiny
from bench.serving.processes import Served


def shared_between_servers(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """Cold on one server, warm on another; then after both and the daemon were restarted."""
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        own = Ours(model, Path(home))
        own.start_daemon()
        try:
            with own.server() as first, own.server() as second:
                text = prompts.of(LONG, ("own", seed))
                cold = _asked(first, model, text)
                other = _asked(second, model, text)
            own.stop_daemon()
            own.start_daemon("--discard")
            with own.server() as third:
                again = _asked(third, model, text)
        finally:
            own.stop_daemon()
    return _ratios(cold, {"another_servers": other, "after_restart": again})


def from_disk(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """Cold, then on a server and a daemon that find the blocks on disk only."""
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        own = Ours(model, Path(home), disk=Path(home) / "disk")
        own.start_daemon()
        try:
            with own.server() as first:
                text = prompts.of(LONG, ("disk", seed))
                cold = _asked(first, model, text)
            own.stop_daemon()
            own.start_daemon("--fresh", "--discard")
            with own.server() as second:
                disk = _asked(second, model, text)
        finally:
            own.stop_daemon()
    return _ratios(cold, {"from_disk": disk})


def split_over_two(model: Path, prompts: Prompts, seed: object) -> dict[str, Any]:
    """Load b on one server, and on two of the same daemon: CPU seconds of all servers together."""
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as home:
        own = Ours(model, Path(home))
        own.start_daemon("--discard")
        try:
            with own.server() as first, own.server() as second:
                one = eight([first], model.name, prompts, (seed, "one"), True)
                two = eight([first, second], model.name, prompts, (seed, "two"), True)
        finally:
            own.stop_daemon()
    return {"one": one, "two": two, "cpu_ratio": two["cpu_s"] / one["cpu_s"]}


def at_once(model: Path, count: int = 1000) -> dict[str, Any]:
    """Without a model: CPU a request, and the rate."""
    port = free_port()
    command = [sys.executable, "-m", "bench.serving.instant", str(model), str(port)]
    with Served("instant", command, f"http://127.0.0.1:{port}", LOGS / "instant.log") as server:
        tiny(server, "instant", 8, 50)
        return {str(beside): tiny(server, "instant", beside, count) for beside in (1, 8)}


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
