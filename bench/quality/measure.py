"""What reuse inside a prompt costs an answer, case by case: the KL to a cold run, at the answer's tokens.

Owns the measurement and its file. Never tunes anything. Invariant: the reference is the same weights' full
prefill of the same tokens with the same attention, fed the same answer (teacher forcing); a case is written
to the file when it is whole, so a run that was cut off goes on behind the last.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from bench.quality.cases import DRAW, KINDS, QUESTIONS, Case, draw
from bench.quality.texts import SEED, Text, digest

STRETCH = 256  # tokens: a cold run that is fed so is as correct as one that is not (bf16)
POOL = 1 << 30


class Subject:
    """The model, attached, with a store of its own for every case."""

    def __init__(self, dtype: str, max_kl: float | None, model: str = "smollm2") -> None:
        import torch
        import transformers

        import kvclient.hf

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        home = _home(model)
        self.torch, self.cache_type = torch, transformers.DynamicCache
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        self.encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        self.head = tokenizer.encode("")  # what each prompt of this model begins with
        auto = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(home, dtype=getattr(torch, dtype)).eval()
        self.repair, self.dtype, self.name = kvclient.hf.Repair(max_kl=max_kl, caution=1.0), dtype, model

    def rows(self, case: Case) -> Iterator[dict[str, Any]]:
        """One for each question."""
        import kvclient
        import kvclient.hf

        case = dataclasses.replace(case, stored=self.head + case.stored, ids=self.head + case.ids)
        cold, cold_s = self._cold(case.ids)
        stretched = self._cold(case.ids, STRETCH)[0] if self.dtype != "float32" else None
        options = {"repair": self.repair, "self_test": False, "weights_digest": bytes(32)}
        with kvclient.InMemoryClient(POOL) as client, kvclient.hf.attach(self.model, client, **options) as kv:
            self._generate(case.stored)
            for number, (question, answer) in enumerate(case.questions):
                rest = case.ids[-1:] + question + answer[:-1]
                (said, question_s) = self._said(cold, len(case.ids) - 1, rest, len(answer))
                with kv.limited(publish_tokens=0):
                    out, own_s = self._generate(case.ids + question)
                cache = getattr(out, "past_key_values", None) or out.cache
                scores, _ = self._said(cache.layers, len(case.ids) - 1, rest, len(answer))
                kl = (said.exp() * (said - scores)).sum(-1).clamp_min(0)
                report = kv.last
                left = 0  # alone: what was found, and computed without being tried
                if report.inside_bypassed in ("reordered", "rounding"):
                    left = report.prompt_tokens - report.reused_tokens
                row = {
                    "case": case.key, "kind": case.kind, "question": number, "names": case.names,
                    "tokens": report.prompt_tokens, "exact": report.reused_tokens,
                    "found": report.approximate_tokens + left, "recomputed": report.recomputed_tokens + left,
                    "estimated": report.estimated_kl, "kl": float(kl.mean()), "worst": float(kl.max()),
                    "top1": float((said.argmax(-1) == scores.argmax(-1)).float().mean()),
                    "cpu_to_cold": own_s / (cold_s + question_s),
                }  # fmt: skip
                if stretched is not None:
                    other, _ = self._said(stretched, len(case.ids) - 1, rest, len(answer))
                    row["spread"] = float((said.exp() * (said - other)).sum(-1).clamp_min(0).mean())
                yield row

    def _cold(self, ids: list[int], stretch: int = 1 << 30) -> tuple[Any, float]:
        """(the layers of the cache of a full prefill, CPU seconds)."""
        cache, began = self.cache_type(config=self.model.config), time.process_time()
        with self.torch.no_grad():
            for start in range(0, len(ids), stretch):
                rows = self.torch.tensor([ids[start : start + stretch]])
                self.model(rows, past_key_values=cache, logits_to_keep=1)
        return cache.layers, time.process_time() - began

    def _said(self, layers: Any, columns: int, rest: list[int], answer: int) -> tuple[Any, float]:
        """(log-probabilities of the answer's tokens behind these layers' first columns, CPU seconds)."""
        cache = self.cache_type(config=self.model.config)
        for kept, layer in zip(cache.layers, layers, strict=True):
            keys, values = layer.keys[:, :, :columns].clone(), layer.values[:, :, :columns].clone()
            kept.lazy_initialization(keys, values)
            kept.keys, kept.values = keys, values
        began = time.process_time()
        with self.torch.no_grad():
            logits = self.model(
                self.torch.tensor([rest]), past_key_values=cache, logits_to_keep=answer
            ).logits[0]
        return logits.double().log_softmax(-1), time.process_time() - began

    def _generate(self, ids: list[int]) -> tuple[Any, float]:
        rows, began = self.torch.tensor([ids]), time.process_time()
        out = self.model.generate(
            rows, attention_mask=self.torch.ones_like(rows), max_new_tokens=1, do_sample=False,
            pad_token_id=0, eos_token_id=None, return_dict_in_generate=True,
        )  # fmt: skip
        return out, time.process_time() - began


def _home(model: str) -> Path:
    """The directory of its weights, fetched first if it is not there."""
    if model == "gemma3":
        from bench.gemma3 import ensure

        return ensure()
    import sys

    from bench.reuse_ttft import ROOT

    sys.path[:0] = [str(ROOT / "examples")]
    import model as example_model

    return Path(example_model.ensure())


def measured(
    subject: Subject, texts: list[Text], counts: dict[str, int], path: Path, short: bool,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """All rows of so many cases of each kind, those of the file first."""
    head = {
        "seed": SEED, "draw": DRAW, "digest": digest(texts), "model": subject.name, "dtype": subject.dtype,
        "max_kl": subject.repair.max_kl, "short": short,
    }  # fmt: skip
    rows = _read(path, head)
    done = {row["case"] for row in rows}
    every = [(kind, n) for n in range(max(counts.values())) for kind in KINDS if n < counts[kind]]
    with open(path, "a", encoding="utf-8") as file:
        if not rows and not path.stat().st_size:
            print(json.dumps(head), file=file, flush=True)
        for at, (kind, number) in enumerate(every):
            case = draw(kind, number, texts, subject.encode, short)
            if case.key in done:
                continue
            new = list(subject.rows(case))
            print(*map(json.dumps, new), sep="\n", file=file, flush=True)
            rows += new
            progress(f"{at + 1} of {len(every)}: {case.key}, KL {mean(row['kl'] for row in new):.1e}")
    wanted = {f"{kind} {number}" for kind, number in every}
    return [row for row in rows if row["case"] in wanted]


def _read(path: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """The whole cases of a file of the same texts and rules. Raises SystemExit for one of others."""
    if not path.exists() or not path.stat().st_size:
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if lines[0] != head:
        raise SystemExit(f"{path} holds {lines[0]}, this would be {head}: give another file, or delete it")
    rows = lines[1:]
    whole = {row["case"] for row in rows if row["question"] == QUESTIONS - 1}
    return [row for row in rows if row["case"] in whole]
