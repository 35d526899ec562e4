"""verify() and calibrate() of an attachment: its own generate(), on an in-memory store, one way of reuse at a
time.

Owns the trial that stands in the place of the user's store, for one thread and one call. Never counts in the
attachment's figures. Invariant: the blocks of a trial are gone when it ends.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvclient.blocks.chunker import Chunker
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.call import Report
from kvclient.hf.model.structure import Refused
from kvclient.hf.proof.attached import Attached
from kvclient.hf.request.request import Options
from kvclient.hf.request.served_model import AS_COMPUTED, ServedModel
from kvclient.hf.reuse.blend import NonPrefixReuse
from kvclient.hf.reuse.eligibility import examine_non_prefix
from kvclient.hf.reuse.quality import calibration
from kvclient.hf.reuse.quality.calibration import Findings
from kvclient.hf.reuse.quality.partial import Partial, Progress, partial_of, shown
from kvclient.hf.reuse.quality.verify import (
    Outcome,
    Question,
    Verification,
    block_tokens_for,
    own_text,
    question_of,
)
from kvclient.hf.reuse.quality.verify import verify as measure
from kvclient.hf.reuse.repair import ATTENDED, Repair

STRATEGIES = ("none", "selective", "cacheblend", "attention")
RATIOS = (0.05, 0.10, 0.15)  # tried by calibration behind "selective", before "attention": the cheapest first
CAUTIONS = (1, 2, 4, 8, 16)  # of a promise, tried until one keeps it: the cheapest first
MOST_BEYOND = 0.02  # of the prompts: may have more than twice what is promised
ROOM = 4  # prompts' worth of blocks a trial's store has room for


class Trial:
    """What a thread's calls use instead of the attachment's own client, options and non-prefix reuse."""

    def __init__(self, client: Any, options: Options, non_prefix: NonPrefixReuse | None) -> None:
        self._client, self._options = client, options
        self._non_prefix = non_prefix
        self.report = Report()

    def on(self, served: ServedModel) -> tuple[Any, ServedModel, Options]:
        """The client, the model and the options of a run on this one."""
        measured = served.elsewhere(self._client, self._options.chunker.most)
        measured = dataclasses.replace(measured, non_prefix=self._non_prefix)
        return self._client, measured, self._options


def verify(
    kv: Attached, model: torch.nn.Module, prompts: Sequence[Any] | None, progress: Progress | None
) -> Verification:
    """Prefix reuse and, where the model allows it, every strategy. Raises Refused as generate() bypasses."""
    kv._served(modes=False)
    questions = _questions(model, prompts)
    try:
        non_prefix = examine_non_prefix(model, kv._model_state.kv, kv.repair or Repair())
    except Refused:
        return _measure(kv, model, None, {}, questions, progress)
    repairs = {name: dataclasses.replace(non_prefix.repair, method=name) for name in STRATEGIES}
    return _measure(kv, model, non_prefix, repairs, questions, progress)


def calibrate(
    kv: Attached, model: torch.nn.Module, prompts: Sequence[Any] | None, progress: Progress | None,
    max_kl: float | None,
) -> tuple[Verification, NonPrefixReuse, Findings, bool]:  # fmt: skip
    """(what was measured last, how the model reuses inside prompts, all that is found of it by now, whether
    something passed). max_kl: that promise is measured, by the attachment's rules, with the least caution
    that keeps it; None: the cheapest repair without one, of Repair's defaults. Raises Refused if nothing but
    prefixes can be reused.
    """
    kv._served(modes=False)
    non_prefix = examine_non_prefix(model, kv._model_state.kv, Repair())
    tries = [_repairs(Repair())] if max_kl is None else _promises(kv._model_state.rules, max_kl)
    unsalted = kv._model_state.served_models.unsalted
    questions = _questions(model, prompts)
    facts = [questions, tries, kv.form.parameters, kv.chunker.block_tokens, kv.backend]
    partial = partial_of(calibration.directory(), unsalted, facts)
    steps = _Steps(progress or shown, len(questions), tries)
    passed = None
    for repairs in tries:
        verification = _measure(kv, model, non_prefix, repairs, questions, steps.of_next(), max_kl, partial)
        passed = next((name for name in repairs if _near(verification[name], max_kl)), None)
        # Where all was computed anew, more caution changes nothing.
        if passed is not None or not any(verification[name].found for name in repairs):
            break
    steps.end()
    partial.end()
    last = next(reversed(repairs)) if passed is None else passed
    change = Findings.with_failed if passed is None else Findings.with_passed
    found = _kept(unsalted, functools.partial(change, repair=repairs[last], outcome=verification[last]))
    return verification, non_prefix, found, passed is not None


def _repairs(default: Repair) -> dict[str, Repair]:
    """Without a promise: the cheapest first, tried together."""
    repairs = {"selective": dataclasses.replace(default, method="selective")} | {
        f"cacheblend {ratio:.2f}": dataclasses.replace(default, method="cacheblend", ratio=ratio)
        for ratio in RATIOS
    }
    attended = {"method": "attention", "attended_ratio": ATTENDED}
    return repairs | {"attention": dataclasses.replace(default, **attended)}


def _promises(rules: Repair, max_kl: float) -> list[dict[str, Repair]]:
    """One after the other, until one is kept."""
    return [
        {f"auto x{caution}": dataclasses.replace(rules, max_kl=max_kl, caution=caution)}
        for caution in CAUTIONS
    ]


def _near(outcome: Outcome, max_kl: float | None) -> bool:
    return outcome.passed and (max_kl is None or outcome.beyond <= MOST_BEYOND)


class _Steps:
    """Counts over several measurements, of which the last ones may not be needed."""

    def __init__(self, progress: Progress, questions: int, tries: Sequence[dict[str, Repair]]) -> None:
        self._progress, self._tries = progress, iter(tries)
        self._counts = {id(repairs): questions * (1 + len(repairs)) for repairs in tries}
        self._total, self._done, self._before = sum(self._counts.values()), 0, 0

    def of_next(self) -> Progress:
        """What the next measurement calls."""
        before, self._before = self._before, self._before + self._counts[id(next(self._tries))]

        def step(done: int, _total: int) -> None:
            self._done = before + done
            self._progress(self._done, self._total)

        return step

    def end(self) -> None:
        """The steps that were not needed are done."""
        if self._done < self._total:
            self._progress(self._total, self._total)


def _kept(unsalted: bytes, change: Callable[[Findings], Findings]) -> Findings:
    """What is found of this model by now."""
    try:
        return calibration.update(unsalted, change)
    except OSError as error:  # what was measured holds all the same
        warnings.warn(f"what calibration found holds here only, it cannot be kept: {error}", stacklevel=4)
        return change(calibration.load(unsalted))


def _questions(model: torch.nn.Module, prompts: Sequence[Any] | None) -> list[Question]:
    with evaluating(model):
        return [question_of(prompt) for prompt in (own_text(model) if prompts is None else prompts)]


def _measure(
    kv: Attached, model: torch.nn.Module, non_prefix: NonPrefixReuse | None, repairs: dict[str, Repair],
    questions: Sequence[Question], progress: Progress | None, max_kl: float | None = None,
    partial: Partial | None = None,
) -> Verification:  # fmt: skip
    with evaluating(model):
        codec = kv.form.codec
        codec = AS_COMPUTED if codec is None else codec.name
        trial = functools.partial(_trial, kv, non_prefix, questions)
        told = {"max_mean_kl": max_kl, "partial": partial, "progress": progress}
        return measure(model, trial, repairs, questions, codec, **told)


def _trial(
    kv: Attached, non_prefix: NonPrefixReuse | None, questions: Sequence[Question],
    repair: Repair | None, call: Callable[[], Any],
) -> Report:  # fmt: skip
    from kvclient.testing.in_memory import InMemoryClient

    size = block_tokens_for(questions, kv.chunker.block_tokens)
    form = kv.form
    if form.step > 1:
        size = max(form.step, size // form.step * form.step)
    layout = form.layout(size)
    longest = max(len(question.ids) for question in questions)
    cut = Chunker("fixed", size)
    options = dataclasses.replace(kv._model_state.options, chunker=cut, follow=False, publish_generated=False)
    inside = None if repair is None or non_prefix is None else dataclasses.replace(non_prefix, repair=repair)
    with InMemoryClient(layout.block_bytes() * (ROOM * longest // size + ROOM)) as client:
        trial = Trial(client, options, inside)
        kv._local.trial = trial
        try:
            with kv.set_here(read=True, write=True):
                call()
        finally:
            kv._local.trial = None
        return trial.report
