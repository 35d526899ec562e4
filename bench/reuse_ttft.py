"""What the store does to the time to the first token, with SmolLM2 and a stock generate().

    python -m bench.reuse_ttft [--json FILE] [--quick] [--dtype bfloat16] [--in-memory] [--dir RUNTIME_DIR]

Four contenders, alternating within one process, one thread, CPU time of the process, medians of the ratios of
a round:
  hf      generate() as it is, with transformers' own attention
  cold    the same with the store attached, on a prompt it has never seen: computes and publishes
  floor   generate() as it is, handed the exact KV of the prefix in memory, by reference
  warm    with the store attached, which has the prefix
The daemon runs in a process of its own, in a temporary directory, unless --dir names a running one or --in-
memory asks for the fake. Owns nothing that lasts. Never compares times of different runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
TAIL_TOKENS = 20
POOL = "1GiB"
START_TIMEOUT_S = 20.0
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: process CPU time is to mean something


def say(text: str) -> None:
    print(f"bench: ttft: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def daemon(memory: str = POOL) -> Iterator[str]:
    """A daemon of our own; its runtime directory."""
    import kvclient

    with tempfile.TemporaryDirectory(prefix="kvbench-ttft-") as home:
        command = [sys.executable, "-m", "kvstored", "serve", "--dir", home, "--memory", memory, "--discard"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    kvclient.connect(dir=home).close()
                    break
                except kvclient.Unavailable:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            yield home
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_TIMEOUT_S)


def load(dtype: str):
    """(model, the token ids of a long real text)."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import model as example_model
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    home = example_model.ensure()
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=getattr(torch, dtype)).eval()
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    return model, transformers.AutoTokenizer.from_pretrained(home).encode(text)


class Contenders:
    """The four ways to a first token. Each answers (CPU seconds, wall seconds, token)."""

    def __init__(self, model, client, **options) -> None:
        import kvclient.hf

        self.model = model
        # The same weights under the attention that transformers chose; attach() may bring another.
        stock = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        self.kv = kvclient.hf.attach(model, client, **options)
        self.plain = lambda *args, **options: type(stock).generate(stock, *args, **options)

    def hf(self, ids) -> tuple[float, float, int]:
        return self._timed(self.plain, ids)

    def stored(self, ids) -> tuple[float, float, int]:
        return self._timed(self.model.generate, ids)

    def floor(self, ids, layers) -> tuple[float, float, int]:
        return self._timed(self.plain, ids, past_key_values=self._handed_over(layers))

    def prefix_of(self, ids, count: int) -> list:
        """The KV of the first tokens, as a cold run of the whole prompt computes it."""
        out = self.plain(ids, **self._config(), return_dict_in_generate=True)
        layers = out.past_key_values.layers
        return [(layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone()) for layer in layers]

    def _handed_over(self, layers):
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    @staticmethod
    def _config() -> dict:
        return {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}

    def _timed(self, generate: Callable, ids, **options) -> tuple[float, float, int]:
        import torch

        mask = torch.ones_like(ids)
        wall, cpu = time.perf_counter(), time.process_time()
        out = generate(ids, attention_mask=mask, **self._config(), **options)
        return time.process_time() - cpu, time.perf_counter() - wall, int(out[0, -1])


def measure_warm(contenders: Contenders, ids: list[int], shared: int, rounds: int) -> dict:
    import torch

    prompt = torch.tensor([ids[: shared + TAIL_TOKENS]])
    contenders.stored(prompt)  # publishes
    layers = contenders.prefix_of(prompt, shared // 128 * 128)
    taken: dict[str, list] = {"floor": [], "warm": []}
    for number in range(rounds + 1):
        calls = [
            ("floor", lambda: contenders.floor(prompt, layers)),
            ("warm", lambda: contenders.stored(prompt)),
        ]
        for name, call in calls[:: -1 if number % 2 else 1]:
            taken[name].append(call())
    report = contenders.kv.last
    taken["hf"] = [contenders.hf(prompt) for _ in range(max(2, rounds // 3))]
    return figures(taken, "warm", "floor", shared) | {
        "reused_tokens": report.reused_tokens,
        "lookup_ms": round(report.lookup_s * 1e3, 3),
        "load_ms": round(report.load_s * 1e3, 3),
    }


def measure_cold(contenders: Contenders, ids: list[int], length: int, rounds: int) -> dict:
    import torch

    taken: dict[str, list] = {"hf": [], "cold": []}
    for number in range(rounds + 1):
        start = length // 8 + number  # another prompt in every round of every length, the same for both
        prompt = torch.tensor([ids[start : start + length]])
        calls = [("hf", lambda p=prompt: contenders.hf(p)), ("cold", lambda p=prompt: contenders.stored(p))]
        for name, call in calls[:: -1 if number % 2 else 1]:
            taken[name].append(call())
    assert contenders.kv.last.reused_tokens == 0, "a prompt meant to be new was found in the store"
    report = contenders.kv.last
    return figures(taken, "cold", "hf", length) | {
        "published_blocks": report.published_blocks,
        "publish_ms": round(report.publish_s * 1e3, 3),
    }


def figures(taken: dict[str, list], ours: str, theirs: str, tokens: int) -> dict:
    """Medians; the first round of each pair warms up and is dropped."""
    pairs = list(zip(taken[ours][1:], taken[theirs][1:], strict=True))
    equal = all(a[2] == b[2] for a, b in pairs)
    result = {"tokens": tokens, "ratio": round(median(a[0] / b[0] for a, b in pairs), 3), "equal": equal}
    result["ratio_wall"] = round(median(a[1] / b[1] for a, b in pairs), 3)
    for name, values in taken.items():
        values = values[1:] or values
        result[f"{name}_cpu_ms"] = round(median(v[0] for v in values) * 1e3, 1)
        result[f"{name}_wall_ms"] = round(median(v[1] for v in values) * 1e3, 1)
    return result


def row(kind: str, found: dict, theirs: str, dtype: str) -> dict:
    """A row of the bench table."""
    names = {
        "warm": ("warm_ttft", "shared tokens", "≤ 1.10 × floor"),
        "cold": ("cold_ttft", "tokens", "≤ 1.03 ×"),
    }
    identifier, what, reach = names[kind]
    cell = {
        "column": "kvstored", "unit": "ms", "value": found[f"{kind}_cpu_ms"], "ratio": found["ratio"],
        "ratio_of": theirs, "note": f"HF {found['hf_cpu_ms']:.0f} ms",
    }  # fmt: skip
    if dtype != "float32":
        cell["variant"] = dtype
    title = f"{kind} TTFT, {found['tokens']:,} {what}, CPU time"
    number = found["tokens"]
    return {"id": f"{identifier}_{number}", "title": title, "reach": reach, "cells": [cell], "detail": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 1,024 tokens only")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--dir", help="the runtime directory of a running daemon")
    parser.add_argument(
        "--in-memory", action="store_true", help="the in-memory fake in the place of a daemon"
    )
    chosen = parser.parse_args()
    lengths = chosen.tokens or ([1024] if chosen.quick else [1024, 2048])
    rounds = chosen.rounds or (5 if chosen.quick else 9)
    model, ids = load(chosen.dtype)
    import kvclient

    rows = []
    with contextlib.ExitStack() as stack:
        if chosen.in_memory:
            client = stack.enter_context(kvclient.InMemoryClient(2 << 30))
        else:
            client = kvclient.connect(dir=chosen.dir or stack.enter_context(daemon()))
            stack.callback(client.close)
        contenders = Contenders(model, client)
        for length in lengths:
            for kind, measure, theirs in (("warm", measure_warm, "floor"), ("cold", measure_cold, "hf")):
                found = measure(contenders, ids, length, rounds)
                say(f"{kind} {json.dumps(found)}")
                rows.append(row(kind, found, theirs, chosen.dtype))
        contenders.kv.detach()
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows, "absent": []}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
