"""verify(): how far from a cold run each way of reuse takes this model, measured on it, as numbers that can
fail.

Owns the measurement and what it reports. Never touches the user's store: every way runs against an in-memory
one, by the very code generate() runs. Invariant: the reference is a full prefill of the same tokens by plain
generate(), and the positions compared are those of the real continuation, fed to both (teacher forcing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.call import Report
from kvclient.hf.release import STATES, cache_of, passing
from kvclient.hf.reuse.quality.partial import Partial, Progress
from kvclient.hf.reuse.repair import Repair

PREFIX = "prefix"
POSITIONS = 64  # of the continuation, at most a quarter of a prompt
LEAD, TAIL = 16, 20  # tokens of a prompt before and behind the part that is reused out of place
MIN_TOKENS = 96
BLOCKS = 4  # a reused part has at least so many
# Where the caller gives none: text the model writes itself, each prompt in so many pieces at once, as a pass
# over twice the rows costs hardly more.
OWN_PROMPTS, OWN_TOKENS, OWN_PIECES = 3, 320, 2
MAX_MEAN_KL = 1e-2  # nats; what approximate reuse may cost to be switched on
MAX_EXACT_KL = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
MAX_CODEC_KL = {"none": 0.0, "int8": 1e-4, "int4": 5e-3}  # of a prefix


@dataclass(frozen=True)
class Outcome:
    """One way of reuse over all prompts. KL in nats, of the cold run's distribution to this one's."""

    strategy: str
    codec: str
    found: float  # share of the prompts' tokens that were reused, and not computed anew to repair them
    mean_kl: float
    max_kl: float
    top1: float  # share of positions with the same most likely token
    first_divergence: int | None  # the earliest position of any prompt where it was another
    ttft_s: float  # mean, as the caller felt it
    cold_ttft_s: float
    limit: float  # of mean_kl
    beyond: float = 0.0  # share of the prompts whose own mean is more than twice that

    @property
    def passed(self) -> bool:
        """Whether something was reused, and its mean KL is within the limit."""
        return self.found > 0 and self.mean_kl <= self.limit


@dataclass(frozen=True)
class Verification:
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether every strategy passed."""
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    def __getitem__(self, strategy: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.strategy == strategy)

    def __str__(self) -> str:
        head = "strategy           codec   found   mean KL    max KL  top-1 first TTFT/cold"
        rows = [
            f"{o.strategy:18} {o.codec:6} {o.found:6.1%} {o.mean_kl:9.2e} {o.max_kl:9.2e} {o.top1:6.1%} "
            f"{'-' if o.first_divergence is None else o.first_divergence:>5} {o.ttft_s / o.cold_ttft_s:9.2f}"
            f"{'' if o.passed else '  FAILED'}"
            for o in self.outcomes
        ]
        return "\n".join([head, *rows])


@dataclass
class _Seen:
    """What was measured of one way, prompt by prompt."""

    kl: list[torch.Tensor] = field(default_factory=list)
    same: list[torch.Tensor] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        self.kl.append(torch.tensor(found["kl"], dtype=torch.float64))
        self.same.append(torch.tensor(found["same"], dtype=torch.bool))
        self.found.append(found["found"])
        self.ttft_s.append(found["ttft_s"])
        self.cold_s.append(found["cold_s"])

    def outcome(self, strategy: str, codec: str, limit: float) -> Outcome:
        kl, diverged = torch.cat(self.kl), [torch.nonzero(~same) for same in self.same]
        return Outcome(
            strategy, codec, mean(self.found), float(kl.mean()), float(kl.max()),
            float(torch.cat(self.same).float().mean()),
            min((int(where[0]) for where in diverged if len(where)), default=None),
            mean(self.ttft_s), mean(self.cold_s), limit,
            mean(float(answer.mean() > 2 * limit) for answer in self.kl),
        )  # fmt: skip


# Runs a call with the store, reusing as the repair says (None: prefixes), and answers its report.
Trial = Callable[[Repair | None, Callable[[], Any]], Report]


class Question(NamedTuple):
    """What is asked, and the answer at whose positions distributions are compared."""

    ids: list[int]
    answer: list[int]


def question_of(prompt: Any) -> Question:
    """Of a pair of token ids (prompt, answer) as it is; of a text alone its end is the answer. Raises
    InvalidArgument for one too short to say anything.
    """
    if len(prompt) == 2 and all(isinstance(part, (Sequence, np.ndarray)) for part in prompt):
        question = Question(*([int(token) for token in part] for part in prompt))
    else:
        text = [int(token) for token in prompt]
        positions = min(POSITIONS, len(text) // 4)
        if len(text) < MIN_TOKENS:
            raise InvalidArgument(f"prompts need at least {MIN_TOKENS} tokens each; this has {len(text)}")
        return Question(text[: len(text) - positions], text[len(text) - positions :])
    if len(question.ids) < MIN_TOKENS or not question.answer:
        lengths = f"{len(question.ids)} and {len(question.answer)}"
        raise InvalidArgument(f"a pair needs {MIN_TOKENS} tokens of prompt, one of answer; it has {lengths}")
    return question


def verify(
    model: torch.nn.Module, trial: Trial, repairs: dict[str, Repair], questions: Sequence[Question],
    codec: str = "none", *, max_mean_kl: float | None = None, partial: Partial | None = None,
    progress: Progress | None = None,
) -> Verification:  # fmt: skip
    """Measures prefix reuse and each of the repairs. max_mean_kl: of the repairs, in nats; None:
    MAX_MEAN_KL. partial: what an interrupted measurement had found; its owner ends it. Raises
    InvalidArgument without a question.
    """
    if not questions:
        raise InvalidArgument(f"there must be a prompt to measure with, of {MIN_TOKENS} tokens at least")
    partial = Partial(None, "") if partial is None else partial
    ways = (PREFIX, *repairs)
    seen = {name: _Seen() for name in ways}
    for number, question in enumerate(questions):
        other = questions[number - 1].ids if len(questions) > 1 else question.ids[::-1]
        cold: _Cold | None = None
        for way, name in enumerate(ways):
            if (found := _read(partial.get(number, name), len(question.answer))) is None:
                cold = _cold(model, question) if cold is None else cold
                found = _tried(model, trial, repairs.get(name), question, other, cold)
                partial.put(number, name, found)
            seen[name].add(found)
            if progress is not None:
                progress(number * len(ways) + way + 1, len(questions) * len(ways))
    exact = max(MAX_EXACT_KL.get(model.dtype, MAX_EXACT_KL[torch.bfloat16]), MAX_CODEC_KL[codec])
    most = MAX_MEAN_KL if max_mean_kl is None else max_mean_kl
    limits = {name: exact if name == PREFIX else most for name in seen}
    return Verification(tuple(sums.outcome(name, codec, limits[name]) for name, sums in seen.items()))


class _Cold(NamedTuple):
    """A question answered without the store."""

    said: torch.Tensor
    seconds: float


def _cold(model: torch.nn.Module, question: Question) -> _Cold:
    began = time.perf_counter()
    out = _first(model, question.ids, plain=True)
    seconds = time.perf_counter() - began
    return _Cold(_said(model, out, question.answer), seconds)


def _tried(
    model: torch.nn.Module, trial: Trial, repair: Repair | None, question: Question, other: list[int],
    cold: _Cold,
) -> dict[str, Any]:  # fmt: skip
    """One way of reuse: as _Seen takes it."""
    ids, kept = question.ids, dict[str, Any]()
    moved = [*other[: LEAD + 5], *ids[LEAD:-TAIL], *other[-TAIL - 40 :]]

    def call() -> None:
        _first(model, ids if repair is None else moved)
        began = time.perf_counter()
        kept["out"] = _first(model, ids)
        kept["ttft_s"] = time.perf_counter() - began

    report = trial(repair, call)
    said = _said(model, kept["out"], question.answer)
    kl = (cold.said.exp() * (cold.said - said)).sum(-1).clamp_min(0)
    same = cold.said.argmax(-1) == said.argmax(-1)
    reused = report.reused_tokens + report.approximate_tokens - report.recomputed_tokens
    times = {"ttft_s": kept["ttft_s"], "cold_s": cold.seconds}
    return {"kl": kl.tolist(), "same": same.tolist(), "found": reused / len(ids), **times}


def _read(found: dict[str, Any] | None, positions: int) -> dict[str, Any] | None:
    """What a file says was found, if it can be that."""
    if found is None or found.keys() != {"kl", "same", "found", "ttft_s", "cold_s"}:
        return None
    lists = [found[name] for name in ("kl", "same")]
    numbers = [found[name] for name in ("found", "ttft_s", "cold_s")]
    whole = all(isinstance(value, list) and len(value) == positions for value in lists)
    return found if whole and all(isinstance(value, float) for value in [*numbers, *found["kl"]]) else None


def block_tokens_for(questions: Sequence[Question], block_tokens: int) -> int:
    """The size of block such prompts can be verified with: what is reused must hold some whole ones."""
    part = min(len(question.ids) for question in questions) - LEAD - TAIL
    return max(1, min(block_tokens, part // BLOCKS))


def own_text(model: torch.nn.Module) -> list[list[int]]:
    """Text the model writes itself: what it finds likely. The random number generators stay as they were.
    Raises InvalidArgument for a model of too few positions.
    """
    config = model.config.get_text_config(decoder=True)
    size, most = config.vocab_size, getattr(config, "max_position_embeddings", None) or OWN_TOKENS
    if most < MIN_TOKENS:
        raise InvalidArgument(f"the model has {most} positions; prompts need at least {MIN_TOKENS} tokens")
    begins = [[size // 3 + i, size // 2 + i] for i in range(OWN_PROMPTS * OWN_PIECES)]
    start = torch.tensor(begins, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        rows = type(model).generate(
            model, start, attention_mask=torch.ones_like(start), do_sample=True, temperature=0.8, top_k=0,
            top_p=1.0, max_new_tokens=min(OWN_TOKENS, most) // OWN_PIECES - start.shape[1],
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return rows.view(OWN_PROMPTS, -1).tolist()


def _first(model: torch.nn.Module, ids: list[int], plain: bool = False) -> Any:
    rows = torch.tensor([ids], device=model.device)
    call = type(model).generate.__get__(model) if plain else model.generate
    return call(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=1, do_sample=False, num_beams=1,
        pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


@torch.no_grad()
def _said(model: torch.nn.Module, out: Any, following: list[int]) -> torch.Tensor:
    """Log-probabilities at each position of the continuation."""
    cache, row = cache_of(out), torch.tensor([following[:-1]], device=model.device)
    states = any(isinstance(layer, STATES) for layer in getattr(cache, "layers", ()))
    parts = row.split(1, dim=1) if states else (row,)  # behind a state some take one at a time only
    rest = [model(input_ids=part, use_cache=True, **passing(cache, model)).logits[0] for part in parts]
    return torch.cat([out.logits[0], *rest]).double().log_softmax(-1)
