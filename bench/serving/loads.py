"""The four loads, of shared/ref's table: one long prompt, eight that share, eight that do not, tiny ones.

Owns what is asked. Prompts are words drawn from a seed, cut to a number of tokens of the model's tokenizer;
each round has words of its own, so nothing of an earlier one is found.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.serving.client import Answer, chat
from bench.serving.processes import Served

WORDS = (
    "river", "stone", "market", "winter", "garden", "engine", "letter", "window", "captain",
    "orange", "silver", "method", "paper", "forest", "signal", "bridge", "morning", "teacher",
    "number", "island", "copper", "village", "question", "summer", "harbour", "pocket", "ladder",
    "mirror",
)  # fmt: skip
QUESTION = " Tell a long story in which each of these words has its place."
LONG, SHARED, OWN, UNSHARED = 1024, 1024, 32, 256  # tokens of the words; the template adds some


class Prompts:
    """count: tokens of a text."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count

    def of(self, tokens: int, seed: object) -> str:
        chance, words = random.Random(repr(seed)), []
        while (have := self._count(" ".join(words))) < tokens:
            words += chance.choices(WORDS, k=max(1, (tokens - have) // 2))
        while self._count(" ".join(words)) > tokens:
            words.pop()
        return " ".join(words)


def together(targets: Sequence[tuple[Served, str, int]], model: str) -> list[Answer]:
    """All at once, each (server, prompt, new tokens) in a thread."""
    out: list[Answer] = [Answer() for _ in targets]

    def ask(index: int) -> None:
        server, prompt, new = targets[index]
        out[index] = chat(server.url, model, prompt, new)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def one_long(server: Served, model: str, prompts: Prompts, seed: object, new: int = 32) -> dict[str, Any]:
    """a: cold, then the same again. first_cpu_s: of one that ends with its first token."""
    prompt, out = prompts.of(LONG, ("a", seed)) + QUESTION, {}
    for which in ("cold", "warm"):
        before = server.cpu_s()
        said = chat(server.url, model, prompt, new)
        _check(said)
        out[which] = {"ttft_s": said.ttft_s, "cpu_s": server.cpu_s() - before, "cached": said.cached,
                      "itl_s": statistics.median(said.gaps_s) if said.gaps_s else None}  # fmt: skip
    out["warm_over_cold"] = out["warm"]["ttft_s"] / out["cold"]["ttft_s"]
    prompt = prompts.of(LONG, ("a first", seed)) + QUESTION
    for which, times in (("cold", 1), ("warm", 4)):
        before = server.cpu_s()
        for _ in range(times):
            _check(chat(server.url, model, prompt, 1))
        out[which]["first_cpu_s"] = (server.cpu_s() - before) / times
    out["warm_over_cold_cpu"] = out["warm"]["first_cpu_s"] / out["cold"]["first_cpu_s"]
    return out


def eight(
    servers: Sequence[Served], model: str, prompts: Prompts, seed: object, shared: bool, new: int = 32
) -> dict[str, Any]:
    """b and c; over several servers by turns."""
    common = prompts.of(SHARED, ("b", seed)) + " " if shared else ""
    dialogue = OWN if shared else UNSHARED
    asked = [
        (servers[i % len(servers)], common + prompts.of(dialogue, ("own", seed, i)) + QUESTION, new)
        for i in range(8)
    ]  # fmt: skip
    before = sum(server.cpu_s() for server in servers)
    said = together(asked, model)
    for reply in said:
        _check(reply)
    wall = max(reply.total_s for reply in said)
    times = sorted(reply.ttft_s for reply in said)
    return {
        "ttft_p50_s": statistics.median(times), "ttft_p99_s": times[-1], "wall_s": wall,
        "tokens_per_s": sum(reply.tokens for reply in said) / wall,
        "cpu_s": sum(server.cpu_s() for server in servers) - before,
        "cached": sum(reply.cached or 0 for reply in said),
    }  # fmt: skip


def tiny(server: Served, model: str, beside: int, count: int) -> dict[str, Any]:
    """d: `beside` clients, `count` requests of one token in all."""
    before, said, lock = server.cpu_s(), [], threading.Lock()
    left = iter(range(count))

    def client() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            reply = chat(server.url, model, "Hello there.", 1)
            with lock:
                said.append(reply)

    threads = [threading.Thread(target=client) for _ in range(beside)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    for reply in said:
        _check(reply)
    return {"requests_per_s": count / wall, "cpu_ms": 1000 * (server.cpu_s() - before) / count,
            "ttft_p50_s": statistics.median(reply.ttft_s or reply.total_s for reply in said)}  # fmt: skip


def _check(said: Answer) -> None:
    if said.status != 200:
        raise RuntimeError(f"status {said.status}: {said.error}")
