"""The time to the first token in vLLM on a CPU, and what a connector without hits costs.

Engines stand side by side and are asked in turn, one at a time, round by round. Every prompt has 1,000
tokens that its engine does not have, or has in the way that the contender's name says, and 20 of its own
behind them. Figures are processor time of the engine's process on one thread, medians, and the median of
the ratios of the rounds; wall time stands beside. The daemon's own processor time is not in them. Never
compares different runs.
"""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from typing import Any

from bench.engines.processes import CACHE, Told, say

SHARED, OWN = 1000, 20
BLOCK = 32
AGAIN = ("spec", "LMCache")  # asked twice in one engine, which forgets in between
BATCH, BATCH_TOKENS, BATCH_PROMPT = 8, 32, 256
POLICY = {"kv_load_failure_policy": "recompute"}


def ours(directory: str, role: str = "kv_both") -> dict[str, Any]:
    return {
        "kv_connector": "KvstoredConnector", "kv_connector_module_path": "kvclient.integrations.vllm",
        "kv_role": role, "kv_connector_extra_config": {"dir": directory}, **POLICY,
    }  # fmt: skip


def spec(directory: str) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "KvstoredOffloadingSpec", "spec_module_path": "kvclient.integrations.vllm",
            "kvstored": {"dir": directory}},
    }  # fmt: skip


def lmcache() -> dict[str, Any]:
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def prompts(seed: int, vocabulary: int) -> tuple[list[int], list[list[int]]]:
    """1,000 tokens, and ends of 20 to stand behind them."""
    made = random.Random(seed)
    return (
        [made.randrange(vocabulary) for _ in range(SHARED)],
        [[made.randrange(vocabulary) for _ in range(OWN)] for _ in range(4)],
    )


class Run:
    """All engines of one model on one daemon."""

    def __init__(self, model: str, vocabulary: int, directory: str, home: Path, others: bool) -> None:
        self._model, self._vocabulary, self._home = model, vocabulary, home
        self._seed = 0
        self.absent: dict[str, str] = {}
        self.engines: dict[str, Told] = {}
        wanted = {
            "plain": None, "first": ours(directory), "second": ours(directory),
            "reader": ours(directory, "kv_consumer"),
        }  # fmt: skip
        if others:
            wanted |= {
                "spec": spec(directory),
                "LMCache": lmcache(),
            }
        for name, transfer in wanted.items():  # one after the other: two cores load one engine as fast as two
            self._start(name, transfer)

    def _start(self, name: str, transfer: dict[str, Any] | None) -> None:
        path = (CACHE / "lmcache",) if name == "LMCache" else ()
        log = self._home / f"{name.replace(' ', '_')}.log"
        told = Told("bench.engines.engine", {"model": self._model, "transfer": transfer}, log, path)
        try:
            answer = told.answer()
        except RuntimeError as error:
            answer = {"error": str(error)[-200:]}
        if answer != "ready":
            self.absent[name] = str(answer["error"])
            told.end()
            say(f"{name} does not start: {self.absent[name][:120]}")
            return
        self.engines[name] = told
        say(f"{name} is up")

    def end(self) -> None:
        for told in self.engines.values():
            told.end()

    def ask(self, name: str, *calls: dict[str, Any]) -> list[dict[str, Any]]:
        return self.engines[name].ask(list(calls))

    def fresh(self) -> tuple[list[int], list[list[int]]]:
        self._seed += 1
        return prompts(self._seed, self._vocabulary)

    # ---------------------------------------------------------------- one round

    def hits(self, row: dict[str, list[dict]]) -> None:
        """The same 1,000 tokens: computed, from vLLM's own cache, and from the store in other engines."""
        shared, ends = self.fresh()
        first = {"prompts": [shared + ends[0]], "tokens": 1, "forget": True}
        request = {"prompts": [shared + ends[1]], "tokens": 1}
        cold, warm = self.ask("plain", first, request)
        expect(cold, 0)
        expect(warm, SHARED // BLOCK * BLOCK)
        row.setdefault("computed", []).append(cold)
        row.setdefault("own cache", []).append(warm)
        self.ask("first", first)
        again = {"prompts": [shared + ends[2]], "tokens": 1, "forget": True}
        (hit,) = self.ask("second", again)
        expect(hit, SHARED // BLOCK * BLOCK)
        row.setdefault("second", []).append(hit)
        for name in [name for name in AGAIN if name in self.engines]:
            between = {"prompts": [ends[3] * 2], "tokens": 2}  # steps in which what is saved behind is saved
            _, _, hit = self.ask(name, first, between, again)
            try:
                expect(hit, SHARED // BLOCK * BLOCK)
            except RuntimeError as error:
                self.absent[name] = str(error)
                self.engines.pop(name).end()
                row.pop(name, None)
                continue
            row.setdefault(name, []).append(hit)

    def misses(self, row: dict[str, list[dict]]) -> None:
        """Prompts that nobody has: what looking, and what looking and saving, costs."""
        for name in ("plain", "reader", "second"):
            shared, ends = self.fresh()
            made = random.Random(self._seed)
            batch = [[made.randrange(self._vocabulary) for _ in range(BATCH_PROMPT)] for _ in range(BATCH)]
            alone, many = self.ask(
                name,
                {"prompts": [shared + ends[0]], "tokens": 1, "forget": True},
                {"prompts": batch, "tokens": BATCH_TOKENS, "forget": True},
            )
            expect(alone, 0)
            row.setdefault(f"{name} ttft", []).append(alone)
            row.setdefault(f"{name} batch", []).append(many)


def expect(answer: dict[str, Any], cached: int | None) -> None:
    if cached is not None and answer["cached"] != [cached]:
        raise RuntimeError(f"{answer['cached']} tokens were cached; {cached} were expected")


def ratio(row: dict[str, list[dict]], name: str, base: str, what: str = "cpu_s") -> float:
    return median(a[what] / b[what] for a, b in zip(row[name], row[base], strict=True))


def summary(row: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """Milliseconds by name, and ratios of the same round."""
    bases = dict.fromkeys(("computed", "second", *AGAIN), "own cache")
    bases |= {
        f"{name} {what}": f"plain {what}" for name in ("reader", "second") for what in ("ttft", "batch")
    }
    found = {}
    for name, answers in row.items():
        found[name] = {
            "cpu_ms": 1e3 * median(answer["cpu_s"] for answer in answers),
            "wall_ms": 1e3 * median(answer["wall_s"] for answer in answers),
            "rounds": len(answers),
        }
        if (base := bases.get(name)) in row:
            found[name]["ratio"] = ratio(row, name, base)
            found[name]["wall_ratio"] = ratio(row, name, base, "wall_s")
    return found
