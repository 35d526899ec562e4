"""What a decode step costs while a store is attached and nothing is to be reused.

    python -m bench.profile.attached

SmolLM2, a prompt of 200 tokens, greedy steps behind its first token, CPU time of each contender's thread:
  hf        plain generate() of a model that was never attached
  bypass    an attached model under `kv.bypass()`: its attention, and no store
  cold      attached, nothing stored: the prompt and the answer are published
  warm      attached, the whole prompt stored
Owns nothing that lasts; never judges. Invariant: all are in the middle of an answer and take a step by turns,
so what a busy machine does to one it does to all; what is told is the median, over all steps, of the quotient
to hf's step of the same turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import itertools

from bench.reuse_ttft import ROOT, say

PROMPT_TOKENS = 200
POOL = 256 << 20


class Turns:
    """One thread runs at a time, each after the other."""

    def __init__(self, count: int) -> None:
        self._count, self._now, self._changed = count, 0, threading.Condition()

    def take(self, number: int) -> None:
        """Waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._now == number)

    def give(self) -> None:
        """To the next."""
        with self._changed:
            self._now = (self._now + 1) % self._count
            self._changed.notify_all()


def by_turns(calls: list[Callable[[Callable[[], None]], Any]]) -> list[tuple[list[float], Any]]:
    """Runs calls beside each other that call what they are given behind each step; all take as many. Of each:
    the thread's CPU seconds at each step, and what it returned.
    """
    turns = Turns(len(calls))
    out: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        at: list[float] = []

        def stepped() -> None:
            at.append(time.thread_time())
            turns.give()
            turns.take(number)

        turns.take(number)
        try:
            out[number] = at, calls[number](stepped)
        finally:
            turns.give()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def answer(model: Any, ids: Any, new: int, stepped: Callable[[], None]) -> list[int]:
    """So many tokens behind a prompt [1, tokens]; stepped is called behind each."""
    import transformers

    class Seen(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_kwargs: Any) -> Any:
            stepped()
            return input_ids.new_zeros(len(input_ids), dtype=bool)

    out = model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        pad_token_id=0, stopping_criteria=transformers.StoppingCriteriaList([Seen()]),
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def measure(dtype: str, rounds: int, new: int) -> dict[str, Any]:
    """Quotients by contender, and the seconds of hf's step."""
    import torch
    import transformers

    import kvclient
    import kvclient.hf

    sys.path[:0] = [str(ROOT / "examples")]
    import model as example_model

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    home = example_model.ensure()
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain, attached = (load(home, dtype=getattr(torch, dtype)).eval() for _ in range(2))
    text = transformers.AutoTokenizer.from_pretrained(home).encode((ROOT / "docs" / "design.md").read_text())
    prompts = [torch.tensor([text[n * 17 : n * 17 + PROMPT_TOKENS]]) for n in range(rounds + 1)]
    names, steps, equal = ("hf", "bypass", "cold", "warm"), [], True
    with kvclient.InMemoryClient(POOL) as client, kvclient.hf.attach(attached, client) as kv:

        def call(name: str, ids: Any, stepped: Callable[[], None]) -> list[int]:
            with kv.bypass() if name == "bypass" else contextlib.nullcontext():
                tokens = answer(plain if name == "hf" else attached, ids, new, stepped)
            if name in ("cold", "warm"):
                assert (kv.last_here.reused_tokens > 0) == (name == "warm"), kv.last_here
            return tokens

        before = call("cold", prompts[0], lambda: None)
        for last, ids in itertools.pairwise(prompts):
            asked = {"hf": ids, "bypass": ids, "cold": ids, "warm": last}
            calls = [lambda stepped, of=(name, asked[name]): call(*of, stepped) for name in names]
            found = by_turns(calls)
            took = [[later - at for at, later in itertools.pairwise(of)] for of, _ in found]
            steps += list(zip(*took, strict=True))
            hf, bypass, cold, warm = (tokens for _, tokens in found)
            equal = equal and hf == bypass == cold and warm == before
            before = cold
        backend = kv.backend
    quotients = {
        name: median(step[number] / step[0] for step in steps) for number, name in enumerate(names) if number
    }
    return {
        "dtype": dtype, "backend": backend, "tokens_equal": equal, "steps": len(steps),
        "hf_step_s": median(step[0] for step in steps), **quotients,
    }  # fmt: skip


def main() -> int:
    name, told = "python -m bench.profile.attached", __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=name, description=told)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--new", type=int, default=48, help="tokens generated in each call")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.dtype, args.rounds, args.new)
    ratios = ", ".join(f"{name} {found[name]:.3f}" for name in ("bypass", "cold", "warm"))
    of = f"{found['steps']} steps, one of plain HF {1e3 * found['hf_step_s']:.1f} ms ({args.dtype})"
    equal = "equal" if found["tokens_equal"] else "NOT equal"
    say(f"{of}; to it: {ratios}; {found['backend']}, tokens {equal}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
