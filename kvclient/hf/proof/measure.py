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
from typing import TYPE_CHECKING, Any

import torch

from kvclient.blocks.chunker import Chunker
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.call import Report
from kvclient.hf.model.structure import Refused
from kvclient.hf.request.request import Options
from kvclient.hf.request.served_model import AS_COMPUTED, ServedModel
from kvclient.hf.reuse.blend import NonPrefixReuse
from kvclient.hf.reuse.eligibility import examine_non_prefix
from kvclient.hf.reuse.quality import calibration
from kvclient.hf.reuse.quality.partial import Progress, partial_of, shown
from kvclient.hf.reuse.quality.verify import Question, Verification, block_tokens_for, own_text, question_of
from kvclient.hf.reuse.quality.verify import verify as measure
from kvclient.hf.reuse.repair import Repair

if TYPE_CHECKING:
    from kvclient.hf.attachment.attach import Attachment

STRATEGIES = ("none", "selective", "cacheblend", "attention")
RATIOS = (0.05, 0.10, 0.15)  # tried by calibration behind "selective", before "attention": the cheapest first
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
    kv: Attachment, model: torch.nn.Module, prompts: Sequence[Any] | None, progress: Progress | None
) -> Verification:
    """Prefix reuse and, where the model allows it, every strategy. Raises Refused as generate() bypasses."""
    kv._served(modes=False)
    try:
        non_prefix = examine_non_prefix(model, kv._model_state.kv, kv.repair or Repair())
    except Refused:
        return _measure(kv, model, None, {}, prompts, progress)
    repairs = {name: dataclasses.replace(non_prefix.repair, method=name) for name in STRATEGIES}
    return _measure(kv, model, non_prefix, repairs, prompts, progress)


def calibrate(
    kv: Attachment, model: torch.nn.Module, prompts: Sequence[Any] | None, progress: Progress | None
) -> tuple[Verification, NonPrefixReuse | None]:
    """(what was measured, what passed). Raises Refused if nothing but prefixes can be reused. Whatever the
    attachment's own repair says, what is tried is what the kept file will stand for.
    """
    kv._served(modes=False)
    non_prefix = examine_non_prefix(model, kv._model_state.kv, Repair())
    repairs = {"selective": dataclasses.replace(non_prefix.repair, method="selective")} | {
        f"cacheblend {ratio:.2f}": dataclasses.replace(non_prefix.repair, method="cacheblend", ratio=ratio)
        for ratio in RATIOS
    }
    attended = {"method": "attention", "attended_ratio": Repair.attended_ratio}
    repairs["attention"] = dataclasses.replace(non_prefix.repair, **attended)
    unsalted = kv._model_state.served_models.unsalted
    verification = _measure(kv, model, non_prefix, repairs, prompts, progress or shown, unsalted)
    for name, repair in repairs.items():
        if verification[name].passed:
            outcome = verification[name]
            _keep(functools.partial(calibration.save, unsalted, repair, outcome))
            return verification, dataclasses.replace(non_prefix, repair=repair)
    _keep(functools.partial(calibration.forget, kv._model_state.served_models.unsalted))
    return verification, None


def _keep(write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:  # what was measured holds all the same
        warnings.warn(f"what calibration found holds here only, it cannot be kept: {error}", stacklevel=4)


def _measure(
    kv: Attachment, model: torch.nn.Module, non_prefix: NonPrefixReuse | None, repairs: dict[str, Repair],
    prompts: Sequence[Any] | None, progress: Progress | None, kept_under: bytes | None = None,
) -> Verification:  # fmt: skip
    """kept_under: the identity under which what was found so far is kept; None: nowhere."""
    with evaluating(model):
        codec = kv.form.codec
        codec = AS_COMPUTED if codec is None else codec.name
        questions = [question_of(prompt) for prompt in (own_text(model) if prompts is None else prompts)]
        facts = [questions, repairs, codec, kv.chunker.block_tokens, kv.backend]
        place = calibration.directory()
        partial = None if kept_under is None else partial_of(place, kept_under, facts)
        trial = functools.partial(_trial, kv, non_prefix, questions)
        return measure(model, trial, repairs, questions, codec, partial=partial, progress=progress)


def _trial(
    kv: Attachment, non_prefix: NonPrefixReuse | None, questions: Sequence[Question],
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
