"""What a step of decoding takes, of one row and of eight, with a model's layers by native/cpu and by torch.

    python -m bench.profile.decode [--beside-llama]

SmolLM2 behind 200 tokens, a forward pass of one new token a row, the cache cut back behind each. Contenders,
by turns: `torch`, the model as it is loaded; `ours`, with the layers and the attention that kvclient-serve
gives it. Of each: the median step, and the thread's processor time of it. With --beside-llama: tokens a
second of the packed model's generate(), by turns with llama.cpp on random words of the same shapes (Q4_0).
Owns nothing that lasts; never judges. Invariant: contenders take their steps in turns, so what a busy machine
does to one it does to the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from bench.install import python_environment
from bench.reuse_ttft import ROOT
from bench.streaming.rows import LLAMA

CONTEXT = 200
NAMES = ("torch", "ours")
ROWS = (1, 8)
PACKED = "awq"  # bf16 with layers of four bits, of random words


def loaded(dtype: str) -> dict[str, Any]:
    """The model, by contender."""
    import torch
    import transformers

    from kvclient.hf import layers
    from kvclient.hf.attention import switch

    sys.path[:0] = [str(ROOT / "examples")]
    import model as example_model

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    home, kind = example_model.ensure(), torch.bfloat16 if dtype == PACKED else getattr(torch, dtype)
    models = {name: load(home, dtype=kind).eval() for name in NAMES}
    if dtype == PACKED:
        for model in models.values():
            pack(model)
    layers.install(models["ours"])
    switch.install(models["ours"])
    return models


def pack(model: Any) -> None:
    """Gives it packed layers of its shapes, of random words in groups of 64, the same for each."""
    import torch

    from kvclient.hf import awq
    from kvclient.hf.attention import one_row
    from kvclient.hf.awq import head

    numbers = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for name, part in list(layer.named_modules()):
            if type(part) is not torch.nn.Linear:
                continue
            made = awq.AwqLinear(part.in_features, part.out_features, 64, False, torch.bfloat16)
            for words in (made.qweight, made.qzeros):
                words.random_(-(1 << 31), (1 << 31) - 1, generator=numbers)
            made.scales.fill_(0.004)
            made.into_panels()
            layer.set_submodule(name, made)
    one_row.give(model)
    head.give(model)


def measure(dtype: str, steps: int) -> list[dict[str, Any]]:
    """A row of the table for each number of rows: seconds by contender, and how far apart the logits are."""
    import torch
    import transformers

    models = loaded(dtype)
    text = torch.arange(CONTEXT)[None] * 37 % 40000 + 100
    found = []
    for rows in ROWS:
        fed = text[:, :1].expand(rows, 1).contiguous()
        caches = {name: transformers.DynamicCache(config=model.config) for name, model in models.items()}
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
        logits = {}
        with torch.inference_mode():
            for name, model in models.items():
                model(input_ids=text.expand(rows, -1), past_key_values=caches[name], logits_to_keep=1)
            for _ in range(steps):
                for name, model in models.items():
                    wall, processor = time.perf_counter(), time.thread_time()
                    out = model(input_ids=fed, past_key_values=caches[name])
                    took[name].append((time.perf_counter() - wall, time.thread_time() - processor))
                    logits[name] = out.logits
                    caches[name].crop(-1)
        apart = (logits["ours"] - logits["torch"]).abs().max() / logits["torch"].abs().max()
        row: dict[str, Any] = {"dtype": dtype, "rows": rows, "apart": float(apart)}
        for name in NAMES:
            walls, processors = zip(*took[name], strict=True)
            row[name] = {"step_s": median(walls), "processor_s": median(processors)}
        found.append(row)
    return found


def beside_llama(tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of one sequence on one thread, behind the first: ours packed in AWQ, and llama.cpp."""
    import torch

    model, python = loaded(PACKED)["ours"], python_environment("xllamacpp", LLAMA)
    made = "from bench.streaming.model import SMOLLM2, ensure_gguf; print(ensure_gguf(SMOLLM2))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", made], env=env, capture_output=True, text=True, check=True)
    path = done.stdout.strip().splitlines()[-1]
    command = [python, "-m", "bench.streaming.run", "llama", path, "--tokens", str(tokens), "--threads", "1"]
    ids, marks = torch.arange(CONTEXT)[None] * 37 % 40000 + 100, list[float]()

    def seen(*_: Any, **__: Any) -> torch.Tensor:
        marks.append(time.perf_counter())
        return torch.zeros(1, dtype=torch.bool)

    found: dict[str, list[float]] = {"ours": [], "llama": []}
    for _ in range(rounds):
        marks.clear()
        with torch.inference_mode():
            model.generate(
                ids, max_new_tokens=tokens + 1, do_sample=False, eos_token_id=None, pad_token_id=0,
                stopping_criteria=[seen],
            )  # fmt: skip
        found["ours"].append(tokens / (marks[-1] - marks[0]))
        theirs = subprocess.run(
            [*command, "--prompt-tokens", str(CONTEXT)], env=env, capture_output=True, text=True, check=True
        )
        found["llama"].append(json.loads(theirs.stdout.splitlines()[-1])["tokens_per_s"])
    return {name: median(rates) for name, rates in found.items()} | {"rounds": found}


def main() -> int:
    name, told = "python -m bench.profile.decode", __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=name, description=told)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", PACKED])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside-llama", action="store_true", help="this alone (llama.cpp from PyPI)")
    parser.add_argument("--tokens", type=int, default=64, help="with --beside-llama (default %(default)s)")
    args = parser.parse_args()
    if args.beside_llama:
        both = beside_llama(args.tokens, 3)
        share = both["ours"] / both["llama"]
        print(f"ours {both['ours']:.1f} tokens/s, llama.cpp {both['llama']:.1f}: {share:.2f} x")
        return 0
    found = [row for dtype in args.dtypes for row in measure(dtype, args.steps)]
    for row in found:
        parts = []
        for name in NAMES:
            step, processor = (1e3 * row[name][what] for what in ("step_s", "processor_s"))
            parts.append(f"{name} {step:.1f} ms ({processor:.1f} of processor)")
        told = f"{row['dtype']}, {row['rows']} rows: {', '.join(parts)}"
        print(f"{told}; logits {row['apart']:.1e} apart", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
