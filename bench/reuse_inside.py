"""What reuse inside a prompt costs and how near it stays to a full prefill, with SmolLM2 and a stock
generate().

    python -m bench.reuse_inside [--json FILE] [--quick] [--dtype bfloat16] [--case NAME] [--ratio R]

Beside each call stands plain generate() on the same tokens, alternating, one thread, CPU time of the process.
The store is a daemon of its own. Quality: mean KL over the next 64 positions of the real continuation, fed
token by token's truth (teacher forcing), to a cold full prefill. Texts are real: this project's documents,
its licence, Python's standard library. Owns nothing that lasts.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.reuse_ttft import ROOT, daemon, say

POSITIONS = 64  # that KL is taken over
QUESTION = 20  # tokens behind a document
SHIFTS = (1, 37, 64, 127)


class Subject:
    """The model, plain and attached, and the texts."""

    def __init__(self, dtype: str, client: Any, repair: Any) -> None:
        import sys

        sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
        import model as example_model
        import torch
        import transformers

        import kvclient.hf

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        home = example_model.ensure()
        self.torch, self.client = torch, client
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        self.encode = tokenizer.encode
        auto = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(home, dtype=getattr(torch, dtype)).eval()
        self.kv = kvclient.hf.attach(self.model, client, repair=repair, self_test=False)
        names = ("docs/design.md", "docs/formats.md", "docs/tour.md", "LICENSE")
        self.texts = [self.encode((ROOT / name).read_text()) for name in names]
        self.code = self.encode(Path(inspect.getfile(argparse)).read_text())

    def generate(self, ids: list[int], plain: bool = False, **given: Any) -> tuple[Any, float]:
        """(what generate() answers, CPU seconds)."""
        rows = self.torch.tensor([ids])
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **given}
        call = type(self.model).generate.__get__(self.model) if plain else self.model.generate
        began = time.process_time()
        out = call(
            rows,
            attention_mask=self.torch.ones_like(rows),
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        return out, time.process_time() - began

    def divergence(self, out: Any, cold: Any, following: list[int]) -> float:
        """Mean KL of what was generated with reuse to the cold run, over the positions that follow."""
        own, full = self._said(out, following), self._said(cold, following)
        return float((full.exp() * (full - own)).sum(-1).mean())

    def _said(self, out: Any, following: list[int]) -> Any:
        torch = self.torch
        with torch.no_grad():
            rest = self.model(torch.tensor([following[:-1]]), past_key_values=out.past_key_values).logits[0]
        return torch.cat([out.logits[0], rest]).float().log_softmax(-1)

    def measured(self, ids: list[int], following: list[int] | None = None, rounds: int = 2) -> dict[str, Any]:
        """Ours against plain, alternating: what was published before is all that is there."""
        ratios, cpu = [], []
        for _ in range(rounds):
            cold, cold_s = self.generate(ids, plain=True)
            with self.kv.bypass(read=False):
                out, own_s = self.generate(ids)
            ratios.append(own_s / cold_s)
            cpu.append(cold_s)
        report = self.kv.last
        answer = {
            "ttft_to_hf": median(ratios),
            "hf_s": median(cpu),
            "found": (report.approximate_tokens + report.reused_tokens) / len(ids),
            "exact": report.reused_tokens,
            "approximate": report.approximate_tokens,
            "recomputed": report.recomputed_tokens,
        }
        if following is not None:
            answer["kl"] = self.divergence(out, cold, following[:POSITIONS])
        return answer


# ---------------------------------------------------------------- the cases


def document(subject: Subject, shifts: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One document behind another preamble, computed inside a prompt, or alone."""
    text, licence, other = subject.texts[0], subject.texts[3], subject.texts[2]
    for size in sizes:
        body, behind = text[300 : 300 + size], text[300 + size :]
        sources = {
            "computed in context": licence[:40] + body + licence[100 : 100 + 60],
            "computed alone": body,
        }
        for name, source in sources.items():
            with namespace(subject):
                subject.generate(source)
                rows = []
                for shift in shifts:
                    prompt = other[50 : 50 + shift] + body + behind[:QUESTION]
                    rows.append(subject.measured(prompt, behind[QUESTION:], rounds=1))
                    rows[-1]["document_found"] = min(1.0, rows[-1]["approximate"] / size)
                every = [
                    found_of(subject, other[50 : 50 + s] + body + behind[:QUESTION], size)
                    for s in range(1, 128)
                ]
            yield averaged(f"document of {size}, {name}", rows) | {"document_found": mean(every)}


def found_of(subject: Subject, prompt: list[int], size: int) -> float:
    from kvclient.blocks import plan

    with plan(subject.client, subject.kv.identity, prompt[:-1], min_tokens=32) as segments:
        return min(1.0, (segments.tokens("approximate") + segments.tokens("exact")) / size)


def swapped(subject: Subject) -> Iterator[dict[str, Any]]:
    """Two documents, in the other order."""
    text, other, licence = subject.texts[0], subject.texts[2], subject.texts[3]
    one, two, behind = other[200:800], text[300:900], text[900:]
    with namespace(subject):
        subject.generate(licence[:40] + one + two + licence[100:160])
        yield averaged(
            "two documents of 600, swapped",
            [subject.measured(licence[:33] + two + one + behind[:QUESTION], behind[QUESTION:], rounds=2)],
        )


def conversation(subject: Subject) -> Iterator[dict[str, Any]]:
    """Eight turns, each a prompt of all that was said."""
    text = subject.texts[1]
    history = list(subject.texts[3][:200])
    ratios, times, equal = [], [], []
    with namespace(subject):
        for turn in range(8):
            history += text[turn * 60 : turn * 60 + 60]
            cold, cold_s = subject.generate(history, plain=True)
            out, own_s = subject.generate(history)
            ratios.append(own_s / cold_s)
            times.append(own_s)
            equal.append(int(out.sequences[0, -1]) == int(cold.sequences[0, -1]))
            answer, _ = subject.generate(history, max_new_tokens=40)
            history = answer.sequences[0].tolist()
    yield {
        "case": "conversation of 8 turns",
        "ttft_to_hf": ratios[-1],
        "last_to_second": times[-1] / times[1],
        "tokens_equal": sum(equal),
        "of": len(equal),
    }


def shared(subject: Subject) -> Iterator[dict[str, Any]]:
    """Exact prefixes as applications have them: the second and later calls."""
    code, text = subject.code, subject.texts[1]
    cases = {
        "code context, 3 questions": (code[:2000], 3),
        "few-shot": (text[:600], 3),
        "system prompt": (text[:260], 3),
    }
    for name, (prefix, questions) in cases.items():
        with namespace(subject):
            subject.generate(prefix + text[1000:1020])
            asks = [text[1100 + 40 * i : 1130 + 40 * i] for i in range(questions)]
            rows = [subject.measured(prefix + ask, rounds=1) for ask in asks]
            yield averaged(name, rows)


def nothing(subject: Subject) -> Iterator[dict[str, Any]]:
    """Prompts nobody has seen: what looking and publishing cost."""
    rows = []
    for start in (100, 1300, 2500):
        ids = subject.code[3000 + start : 3000 + start + 1000]
        ratios = []
        for number in range(2):
            with namespace(subject):
                calls = [subject.generate(ids, plain=(number + k) % 2 == 0)[1] for k in range(2)]
            plain, own = calls if number % 2 == 0 else calls[::-1]
            ratios.append(own / plain)
        rows.append({"ttft_to_hf": median(ratios), "found": 0.0})
    yield averaged("nothing to reuse, 1,000 tokens", rows)


CASES = {
    "document": document,
    "swapped": swapped,
    "conversation": conversation,
    "shared": shared,
    "nothing": nothing,
}


class namespace:
    """Within it, an identity of its own: nothing of the cases before is found."""

    number = 0

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        import kvclient.hf

        kv = self._subject.kv
        kv.detach()
        namespace.number += 1
        self._subject.kv = kvclient.hf.attach(
            self._subject.model, kv.client, repair=kv._repair, self_test=False,
            salt=f"case {namespace.number}", weights_digest=bytes(32),
        )  # fmt: skip

    def __exit__(self, *_exc: object) -> None:
        pass


def averaged(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"case": name, **{key: mean(row[key] for row in rows) for key in rows[0]}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one size, two shifts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--ratio", type=float, help="of the repair, where it is not the default")
    chosen = parser.parse_args()
    import kvclient
    import kvclient.hf

    repair = kvclient.hf.Repair(**({} if chosen.ratio is None else {"ratio": chosen.ratio}))
    rows = []
    with daemon() as home, kvclient.connect(dir=home) as client:
        subject = Subject(chosen.dtype, client, repair)
        subject.generate(subject.code[:150], plain=True)  # whatever torch does once
        for name in chosen.case or CASES:
            given = ()
            if name == "document":
                given = ((1, 64), (1000,)) if chosen.quick else (SHIFTS, (1000, 2000))
            for row in CASES[name](subject, *given):
                rows.append(row)
                say(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if chosen.json:
        chosen.json.write_text(json.dumps({"dtype": chosen.dtype, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
