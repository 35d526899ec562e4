"""What the reuse examples share: the engine, and an answer printed beside the one of plain generate().

    --model DIR   another model than SmolLM2
    --dir DIR     the runtime directory of a running daemon; without, a store in this process's memory
    --tokens N    of each answer
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

import kvclient
import kvclient.hf

ROOT = Path(__file__).resolve().parent.parent


def engine(description: str | None, **options) -> kvclient.hf.Engine:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model")
    parser.add_argument("--dir")
    parser.add_argument("--tokens", type=int, default=24)
    chosen = parser.parse_args()
    if chosen.model is None:
        import model as example_model

        chosen.model = example_model.ensure()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    client = kvclient.connect(dir=chosen.dir) if chosen.dir else kvclient.InMemoryClient(1 << 30)
    made = kvclient.hf.Engine.from_pretrained(chosen.model, client, dtype=torch.float32, **options)
    made.answer_tokens = chosen.tokens
    return made


def text_of(name: str, characters: int) -> str:
    """A real text: the beginning of one of the project's files."""
    return (ROOT / name).read_text(encoding="utf-8")[:characters]


def ask(engine: kvclient.hf.Engine, label: str, prompt) -> kvclient.hf.Result:
    """The answer with reuse. Prints one line: TTFT of plain generate() and of this, and what was reused."""
    baseline = engine.generate(prompt, engine.answer_tokens, "baseline")
    result = engine.generate(prompt, engine.answer_tokens)
    report = result.report
    print(
        f"{label:28} {result.prompt_tokens:5} tokens   baseline {baseline.ttft_s:6.2f} s   with the store "
        f"{result.ttft_s:6.2f} s   exact {report.reused_tokens:5}, moved {report.approximate_tokens:5}, "
        f"of those repaired {report.recomputed_tokens:4}   "
        f"{'the same answer' if result.tokens == baseline.tokens else 'another answer'}"
    )
    return result
