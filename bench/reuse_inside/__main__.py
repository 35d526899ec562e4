"""What reuse inside a prompt costs and how near it stays to a full prefill, with SmolLM2 and a stock
generate().

    python -m bench.reuse_inside [--json FILE] [--quick] [--dtype bfloat16] [--case NAME] [--kvboost]

Beside each call stands plain generate() on the same tokens, alternating, one thread, CPU time of the process.
The store is a daemon of its own. Quality: mean KL over the next 64 positions of the real continuation, fed
token by token's truth (teacher forcing), to a cold full prefill. Texts are real: this project's documents,
its licence, Python's standard library. Owns nothing that lasts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.reuse_inside.long import choice, codecs, far, queries, rounding, search
from bench.reuse_inside.oracle import oracle
from bench.reuse_inside.swapped import POSITIONS, QUESTION, averaged, others, swapped
from bench.reuse_ttft import ROOT, daemon, say

WINDOW_POSITIONS = 16  # of each turn, fed one by one
WAYS_TO_CUT = ("fixed", "sentence", "paragraph", "document")
CHUNKERS = (("fixed", 0), *((name, n) for name in ("sentence", "paragraph") for n in (0, 64)))
SHIFTS = (1, 37, 64, 127)


class Subject:
    """The model, plain and attached, and the texts."""

    def __init__(self, dtype: str, client: Any, repairs: dict[str, Any], kvboost: bool) -> None:
        import sys

        sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
        import model as example_model
        import torch
        import transformers

        import kvclient.hf
        from kvclient.hf.attention.switch import without

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        home = example_model.ensure()
        self.torch, self.client = torch, client
        self.without = without  # plain generate() has the attention transformers chose
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        self.encode = self.tokenizer.encode
        auto = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(home, dtype=getattr(torch, dtype)).eval()
        self.repairs, self.cases = repairs, 0
        first = next(iter(repairs.values()))
        self.kv = kvclient.hf.attach(self.model, client, repair=first, self_test=False)
        self.boosted = None
        if kvboost:
            from bench.reuse_inside.peers import Boosted

            self.boosted = Boosted(self.model, self.tokenizer)
        names = ("docs/design.md", "docs/formats.md", "docs/tour.md", "LICENSE")
        self.texts = [self.encode((ROOT / name).read_text()) for name in names]
        self.code = self.encode(Path(inspect.getfile(argparse)).read_text())

    def generate(self, ids: list[int], plain: bool = False, **more: Any) -> tuple[Any, float]:
        """(what generate() answers, CPU seconds)."""
        rows = self.torch.tensor([ids])
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
        call = type(self.model).generate.__get__(self.model) if plain else self.model.generate
        with self.without(self.model) if plain else contextlib.nullcontext():
            began = time.process_time()
            out = call(
                rows,
                attention_mask=self.torch.ones_like(rows),
                return_dict_in_generate=True,
                output_logits=True,
                **options,
            )
            return out, time.process_time() - began

    def fresh(self) -> None:
        """An identity of its own: nothing of the cases before is found."""
        self.cases += 1
        if self.boosted is not None:
            self.boosted.fresh()
        self.reattach(f"case {self.cases}")

    def reattach(self, salt: str, **options: Any) -> None:
        """An identity of its own."""
        import kvclient.hf

        repair = self.kv.repair
        self.kv.detach()
        self.kv = kvclient.hf.attach(
            self.model, self.client, repair=repair, self_test=False, salt=salt, weights_digest=bytes(32),
            **options,
        )  # fmt: skip

    def store(self, ids: list[int]) -> None:
        """What all contenders may use from here on."""
        self.generate(ids)
        if self.boosted is not None:
            with self.without(self.model):
                self.boosted.store(ids)

    def said(self, logits: Any, cache: Any, following: list[int], plain: bool = False) -> Any:
        torch = self.torch
        with torch.no_grad(), self.without(self.model) if plain else contextlib.nullcontext():
            rest = self.model(torch.tensor([following[:-1]]), past_key_values=cache).logits[0]
        return torch.cat([logits.reshape(1, -1).float(), rest.float()]).log_softmax(-1)

    @staticmethod
    def far(said: Any, other: Any) -> float:
        """Mean KL."""
        return float((said.exp() * (said - other)).sum(-1).mean())

    def measured(
        self, ids: list[int], following: list[int] | None = None, only: str | None = None
    ) -> list[dict[str, Any]]:
        """Each repair against one plain run: what was published before is all that is there."""
        cold, cold_s = self.generate(ids, plain=True)
        rows = []

        def far(logits: Any, cache: Any, plain: bool = False) -> dict[str, float]:
            if following is None:
                return {}
            scores = self.said(logits, cache, following[:POSITIONS], plain)
            return {"kl": self.far(said, scores)}

        if following is not None:
            said = self.said(cold.logits[0], cold.past_key_values, following[:POSITIONS], plain=True)
        for name, repair in self.repairs.items():
            if only not in (None, name):
                continue
            with self.kv.bypass(read=False), repaired(self.kv, repair):
                out, own_s = self.generate(ids)
            report = self.kv.last
            answer = {
                "repair": name,
                "ttft_to_hf": own_s / cold_s,
                "hf_s": cold_s,
                "exact": report.reused_tokens,
                "approximate": report.approximate_tokens,
                "recomputed": report.recomputed_tokens,
            }
            rows.append(answer | far(out.logits[0], out.past_key_values))
        if self.boosted is not None:
            with self.without(self.model):
                logits, cache, own_s, found = self.boosted.first(ids)
            row = {"repair": "kvboost", "ttft_to_hf": own_s / cold_s, "hf_s": cold_s, "exact": found}
            rows.append(row | {"approximate": 0, "recomputed": 0} | far(logits, cache, plain=True))
        return rows


@contextlib.contextmanager
def repaired(kv: Any, repair: Any) -> Iterator[None]:
    """Within it, another repair; what the model was proven with stays."""
    before = kv._model_state.served
    non_prefix = dataclasses.replace(before.non_prefix, repair=repair)
    kv._model_state.served = dataclasses.replace(before, non_prefix=non_prefix)
    try:
        yield
    finally:
        kv._model_state.served = before


# ---------------------------------------------------------------- the cases


def document(subject: Subject, shifts: tuple[int, ...], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """One document behind another preamble, computed inside a prompt, or alone."""
    text, licence, other = subject.texts[0], subject.texts[3], subject.texts[2]
    for size in sizes:
        body, behind = text[300 : 300 + size], text[300 + size :]
        prompts = {s: other[50 : 50 + s] + body + behind[:QUESTION] for s in range(1, 128)}
        sources = {
            "computed in context": licence[:40] + body + licence[100:160],
            "computed alone": body,
        }
        for name, source in sources.items():
            subject.fresh()
            subject.store(source)
            rows = [row for s in shifts for row in subject.measured(prompts[s], behind[QUESTION:])]
            found = mean(found_of(subject, prompt, size) for prompt in prompts.values())
            for row in averaged(f"document of {size}, {name}", rows):
                yield row | {"document_found": found}


def found_of(subject: Subject, prompt: list[int], size: int) -> float:
    from kvclient.blocks import plan

    kv = subject.kv
    with plan(subject.client, kv.identity, prompt[:-1], min_tokens=32, chunker=kv.chunker) as segments:
        return min(1.0, (segments.tokens("approximate") + segments.tokens("exact")) / size)


def conversation(subject: Subject) -> Iterator[dict[str, Any]]:
    """Eight turns, each a prompt of all that was said."""
    text = subject.texts[1]
    history = list(subject.texts[3][:200])
    ratios, times, equal, theirs = [], [], [], []
    subject.fresh()
    for turn in range(8):
        history += text[turn * 60 : turn * 60 + 60]
        cold, cold_s = subject.generate(history, plain=True)
        out, own_s = subject.generate(history)
        ratios.append(own_s / cold_s)
        times.append(own_s)
        equal.append(int(out.sequences[0, -1]) == int(cold.sequences[0, -1]))
        if subject.boosted is not None:
            with subject.without(subject.model):
                theirs.append(subject.boosted.first(history)[2] / cold_s)
        answer, _ = subject.generate(history, max_new_tokens=40)
        history = answer.sequences[0].tolist()
        if subject.boosted is not None:
            with subject.without(subject.model):
                subject.boosted.store(history[:-1])
    yield {
        "case": "conversation of 8 turns",
        "ttft_to_hf": ratios[-1],
        "last_to_second": times[-1] / times[1],
        "tokens_equal": sum(equal),
        "of": len(equal),
    } | ({"kvboost_ttft_to_hf": mean(theirs[1:])} if theirs else {})


def shared(subject: Subject) -> Iterator[dict[str, Any]]:
    """Exact prefixes as applications have them: the second and later calls."""
    code, text = subject.code, subject.texts[1]
    cases = {"code context, 3 questions": code[:2000], "few-shot": text[:600], "system prompt": text[:260]}
    for name, prefix in cases.items():
        subject.fresh()
        subject.store(prefix + text[1000:1020])
        prompts = [prefix + text[1100 + 40 * i : 1130 + 40 * i] for i in range(3)]
        rows = [row for ids in prompts for row in subject.measured(ids, only="auto")]
        yield from averaged(name, rows)


def nothing(subject: Subject) -> Iterator[dict[str, Any]]:
    """Prompts nobody has seen: what looking and publishing cost."""
    ratios, theirs = [], []
    for number, start in enumerate((3100, 4300, 5500, 6700)):
        ids = subject.code[start : start + 1000]
        subject.fresh()
        times = {
            plain: subject.generate(ids, plain=plain)[1] for plain in (number % 2 == 0, number % 2 == 1)
        }
        if subject.boosted is not None:
            with subject.without(subject.model):
                theirs.append(subject.boosted.first(ids)[2] / times[True])
        ratios.append(times[False] / times[True])
    yield {"case": "nothing to reuse, 1,000 tokens", "ttft_to_hf": median(ratios)} | (
        {"kvboost_ttft_to_hf": median(theirs)} if theirs else {}
    )


def window(subject: Subject) -> Iterator[dict[str, Any]]:
    """A long text fed by turns of 200 tokens into bounded memory, against all of it in full."""
    from kvclient.hf.engine.window import Window, WindowCache

    torch, text, turns = subject.torch, subject.texts[1][:1600], range(200, 1600, 200)
    with torch.no_grad():
        rows = [i for start in turns for i in range(start - 1, start + WINDOW_POSITIONS - 1)]
        cold = subject.model(torch.tensor([text])).logits[0, rows].log_softmax(-1)
    for recent, older in ((128, 1536), (128, 512), (128, 0)):
        cache = WindowCache(subject.model, Window(recent=recent, older=older))
        far: list[float] = []
        sizes, fed = [], 0
        for start in turns:
            said = [cache.feed(text[fed:start])]
            fed = start + WINDOW_POSITIONS - 1
            said += [cache.feed([token]) for token in text[start:fed]]
            true = cold[len(far) * WINDOW_POSITIONS :][:WINDOW_POSITIONS]
            scores = torch.stack(said).log_softmax(-1)
            far.append(float((true.exp() * (true - scores)).sum(-1).mean()))
            sizes.append(cache.held)
        yield {
            "case": f"window {recent}+{older}", "kl_of_turns": " ".join(f"{kl:.1e}" for kl in far),
            "kib_of_turns": " ".join(str(held.bytes >> 10) for held in sizes),
            "dropped": sizes[-1].dropped_tokens, "full_kib": sizes[-1].full_bytes >> 10,
        }  # fmt: skip


def chunkers(subject: Subject) -> Iterator[dict[str, Any]]:
    """A document of 1,000 tokens warmed in parts by each chunker, or computed in context in blocks cut by it;
    then behind another preamble.
    """
    text, licence, other = subject.texts[0], subject.texts[3], subject.texts[2]
    body, behind = text[300:1300], text[1300:]
    prompts = [other[50 : 50 + s] + body + behind[:QUESTION] for s in (37, 127)]
    ways = [(True, *way) for way in CHUNKERS] + [(False, name, 0) for name in WAYS_TO_CUT]
    for alone, chunker, overlap in ways:
        subject.fresh()
        cut = "fixed" if alone else chunker
        subject.reattach(f"{alone} {chunker} {overlap}", chunker=cut, tokenizer=subject.tokenizer)
        parts = 1
        if alone:
            parts = subject.kv.warm(body, chunker=chunker, overlap_tokens=overlap).parts
        else:
            subject.generate(licence[:40] + body + licence[100:160])
        rows = [row for ids in prompts for row in subject.measured(ids, behind[QUESTION:], only="auto")]
        found = mean(found_of(subject, prompt, len(body)) for prompt in prompts)
        how = f"warmed, overlap {overlap}" if alone else "in context, blocks cut so"
        for row in averaged(f"{chunker}, {how}", rows):
            yield row | {"parts": parts, "document_found": found}
    subject.reattach("after chunkers")


CASES: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "queries": queries,
    "far": far,
    "choice": choice,
    "codecs": codecs,
    "rounding": rounding,
    "search": search,
    "window": window,
    "chunkers": chunkers,
    "document": document,
    "swapped": swapped,
    "conversation": conversation,
    "shared": shared,
    "nothing": nothing,
}
ONLY_ASKED: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {"oracle": oracle, "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one size, two shifts")
    parser.add_argument("--tokens", type=int, nargs="+", help="the sizes of documents (document, swapped)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kvboost", action="store_true", help="KVBoost 0.9.0 beside it, from PyPI")
    parser.add_argument(
        "--attended-ratio", type=float, nargs="+", default=[], help="and Repair('attention') with each"
    )
    parser.add_argument("--case", action="append", choices=[*CASES, *ONLY_ASKED], default=[])
    chosen = parser.parse_args()
    import kvclient
    import kvclient.hf

    repairs = {name: kvclient.hf.Repair(name, max_kl=None) for name in ("auto", "selective", "none")}
    for ratio in chosen.attended_ratio:
        repairs[f"attention {ratio:g}"] = kvclient.hf.Repair("attention", attended_ratio=ratio)
    rows = []
    with daemon() as home, kvclient.connect(dir=home) as client:
        subject = Subject(chosen.dtype, client, repairs, chosen.kvboost)
        subject.generate(subject.code[:150], plain=True)  # whatever torch does once
        for name in chosen.case or CASES:
            options: tuple[Any, ...] = ()
            if name == "document":
                sizes = chosen.tokens or ([1000] if chosen.quick else [1000, 2000])
                options = ((1, 64) if chosen.quick else SHIFTS, sizes)
            elif name == "swapped" and chosen.tokens:
                options = (chosen.tokens,)
            for row in (CASES | ONLY_ASKED)[name](subject, *options):
                rows.append(row)
                say(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if chosen.json:
        chosen.json.write_text(json.dumps({"dtype": chosen.dtype, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
