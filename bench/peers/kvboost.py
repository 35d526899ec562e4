"""KVBoost 0.9.0 on the example model: TTFT of an exact prefix, and whether the tokens are right.

A script of its own, not a JSON-lines driver: it needs torch and transformers. Beside it runs the floor, the
same model handed the prefix's KV from memory; the two alternate. CPU time of this process, one thread.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
TAIL_TOKENS = 20
NEW_TOKENS = 32
STRATEGIES = ("none", "selective")


def say(text: str) -> None:
    print(f"bench: kvboost: {text}", file=sys.stderr, flush=True)


def load():
    """(model, tokenizer, the token ids of a long technical text)."""
    sys.path.insert(0, str(ROOT / "examples"))
    import model as example_model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    home = example_model.ensure()
    tokenizer = AutoTokenizer.from_pretrained(home)
    model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    text = Path(argparse.__file__).read_text(encoding="utf-8")[:40_000]
    return model, tokenizer, tokenizer.encode(text)


class Floor:
    """The model as it is, given the exact KV of a prefix that lies in memory."""

    def __init__(self, model, prefix: list[int]):
        import torch
        from transformers import DynamicCache

        self.model, self.torch, self.cache_class = model, torch, DynamicCache
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([prefix]), use_cache=True, logits_to_keep=1).past_key_values
        self.layers = [(layer.keys, layer.values) for layer in whole.layers]

    def generate(self, tail: list[int], new_tokens: int) -> list[int]:
        cache = self.cache_class()
        for index, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, index)
        tokens, fed = [], self.torch.tensor([tail])
        with self.torch.no_grad():
            for _ in range(new_tokens):
                logits = self.model(
                    input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1
                ).logits
                tokens.append(int(logits[0, -1].argmax()))
                fed = self.torch.tensor([[tokens[-1]]])
        return tokens


class Boosted:
    """KVBoost with its prefix warmed; token ids stand in for text, so that lengths are exact."""

    def __init__(self, model, tokenizer, strategy: str, prefix: list[int]):
        from kvboost import KVBoost

        self.engine = KVBoost(
            model, tokenizer, max_cache_bytes=4 << 30, recompute_strategy=strategy, device="cpu"
        )
        self.ids = {"prefix": prefix}
        self.engine._encode = self.ids.__getitem__
        self.engine.warm("prefix")

    def generate(self, tail: list[int], new_tokens: int) -> tuple[list[int], float]:
        """(tokens, CPU seconds to the first of them)."""
        self.ids["prompt"] = self.ids["prefix"] + tail
        tokens, first = [], []

        def on_token(token):
            first or first.append(time.process_time())
            tokens.append(int(token))

        start = time.process_time()
        self.engine.generate("prompt", max_new_tokens=new_tokens, on_token=on_token)
        return tokens, first[0] - start


def agreement(left: list[int], right: list[int]) -> int:
    """How many tokens from the start are those of the plain model."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def measure(model, tokenizer, ids: list[int], shared: int, repeats: int) -> dict:
    prefix, tail = ids[:shared], ids[shared : shared + TAIL_TOKENS]
    floor = Floor(model, prefix)
    boosted = {strategy: Boosted(model, tokenizer, strategy, prefix) for strategy in STRATEGIES}
    taken: dict[str, list[float]] = {"floor": []} | {strategy: [] for strategy in STRATEGIES}
    for _ in range(repeats):
        start = time.process_time()
        floor.generate(tail, 1)
        taken["floor"].append(time.process_time() - start)
        for strategy, engine in boosted.items():
            taken[strategy].append(engine.generate(tail, 1)[1])
    right = floor.generate(tail, NEW_TOKENS)
    cells = []
    for strategy, engine in boosted.items():
        same = agreement(engine.generate(tail, NEW_TOKENS)[0], right)
        ratio = median(ours / low for ours, low in zip(taken[strategy], taken["floor"], strict=True))
        cells.append(
            {
                "column": "kvboost",
                "variant": strategy,
                "unit": "ms",
                "value": round(median(taken[strategy]) * 1e3, 1),
                "ratio": round(ratio, 2),
                "ratio_of": "floor",
                "tokens_equal": same,
                "note": f"first {same} of {NEW_TOKENS} greedy tokens right",
            }
        )
        say(f"{shared} tokens, {strategy}: {cells[-1]['value']} ms, {ratio:.2f} × floor, {same} tokens right")
    return {
        "id": f"warm_ttft_{shared}",
        "title": f"warm TTFT, {shared:,} shared tokens, CPU time",
        "reach": "≤ 1.10 × floor",
        "cells": cells,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    sys.path.insert(0, os.environ.get("KVBENCH_KVBOOST") or str(ROOT / "build" / "bench-venvs" / "kvboost"))
    model, tokenizer, ids = load()
    lengths = [1024] if chosen.quick else [1024, 2048]
    rows = [measure(model, tokenizer, ids, shared, 2 if chosen.quick else 3) for shared in lengths]
    chosen.json.write_text(json.dumps({"rows": rows, "absent": []}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
