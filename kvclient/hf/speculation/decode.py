"""The decode loop of generate() with drafts.

    model.generate(**inputs, custom_generate=Speculation())

Owns the order of drafting, the pass, acceptance, the cut of the cache, and only then whoever listens to new
tokens: so the store (an attached model's) never sees a rejected token's keys and values. Never changes what
generate() prepares: processors and stopping criteria are asked token by token with the same ids.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument
from kvclient.hf.release import cache_of, passing
from kvclient.hf.speculation.acceptance import Path, match, reject
from kvclient.hf.speculation.cache import cut, keep, score, trees, unfit
from kvclient.hf.speculation.draft import NOTHING, Draft, Drafter
from kvclient.hf.speculation.draft_model import DraftModel
from kvclient.hf.speculation.lookup import PromptLookup
from kvclient.hf.speculation.pace import Pace

DEPTH, NODES = 64, 255  # of a draft, at most


@dataclass
class SpeculationReport:
    """One answer. Seconds of wall time; `passes` and `decode_s` without the prompt's."""

    tokens: int = 0
    passes: int = 0
    drafted_passes: int = 0
    drafted: int = 0  # tokens guessed
    accepted: int = 0  # of those
    draft_s: float = 0.0
    decode_s: float = 0.0
    plain_pass_s: float | None = None  # what a pass of one token takes
    off: str | None = None  # why nothing was drafted at all, as a word

    @property
    def acceptance(self) -> float:
        """Accepted tokens of those drafted, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Without the first token, which is the prompt's."""
        return max(0, self.tokens - 1) / self.passes if self.passes else 0.0

    @property
    def speed_up(self) -> float | None:
        """Over one token a pass, as measured in between; None: nothing was."""
        if not self.decode_s or self.plain_pass_s is None:
            return None
        return max(0, self.tokens - 1) * self.plain_pass_s / self.decode_s


class Speculation:
    """draft: None looks into the text itself; a small causal model; or any Drafter. depth: tokens guessed one
    behind the other; nodes: of a tree, in all. One object serves one model; `last` is this thread's last
    report. It stops guessing where that does not pay, and tries again later.
    """

    def __init__(
        self, draft: torch.nn.Module | Drafter | None = None, *, depth: int = 10, nodes: int = 15,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        check_bounds("depth", depth, 1, DEPTH)
        check_bounds("nodes", nodes, 1, NODES)
        if isinstance(draft, torch.nn.Module):
            draft = DraftModel(draft)
        self._drafter: Drafter = PromptLookup() if draft is None else draft
        if not hasattr(self._drafter, "begin"):
            raise InvalidArgument(f"draft={draft!r:.80}; it must be a model or have begin()")
        self._depth, self._nodes, self._clock = depth, nodes, clock
        self._pace, self._local = Pace(), threading.local()

    @property
    def last(self) -> SpeculationReport | None:
        """Of the last call of this thread; None before it."""
        return getattr(self._local, "last", None)

    def __call__(
        self, model: torch.nn.Module, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """What transformers calls in the place of its own loop."""
        if max(generation_config.num_beams or 1, 1) > 1:
            raise InvalidArgument(f"num_beams={generation_config.num_beams}; drafts have no beams")
        report = self._local.last = SpeculationReport()
        options = {
            "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
            "generation_config": generation_config, "synced_gpus": synced_gpus, "streamer": streamer,
        }  # fmt: skip
        report.off = _off(model, input_ids, generation_config, model_kwargs)
        if report.off is not None:
            return model._sample(input_ids, **options, **model_kwargs)
        answer = _Answer(
            self, model, input_ids, logits_processor, stopping_criteria, generation_config, report
        )
        return answer.run(model_kwargs, streamer)


def _off(model: torch.nn.Module, ids: torch.Tensor, config: Any, inputs: dict[str, Any]) -> str | None:
    if ids.shape[0] != 1:
        return "rows"
    if not inputs.get("use_cache", True):
        return "no_cache"
    if config.output_attentions or config.output_hidden_states:
        return "outputs"
    if inputs.get("inputs_embeds") is not None:
        return "inputs"
    mask = inputs.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        return "attention_mask"
    return None


class _Answer:
    """One call."""

    def __init__(
        self, owner: Speculation, model: torch.nn.Module, ids: torch.Tensor, processor: Any, criteria: Any,
        config: Any, report: SpeculationReport,
    ) -> None:  # fmt: skip
        self._own, self._model, self._ids = owner, model, ids
        self._processor, self._criteria, self._config, self.report = processor, criteria, config, report
        told = config.return_dict_in_generate
        self._scores: list[torch.Tensor] | None = [] if told and config.output_scores else None
        self._logits: list[torch.Tensor] | None = [] if told and config.output_logits else None
        self._sample = float(config.temperature or 1.0) if config.do_sample else None

    def run(self, inputs: dict[str, Any], streamer: Any) -> Any:
        mask = inputs.get("attention_mask")
        pad = 0 if mask is None else int((mask == 0).sum())
        out = self._model._prefill(self._ids, self._config, inputs)
        cache = cache_of(out)
        stopped = self._take(self._choose(NOTHING, out.logits[:, -1]), streamer)
        self.report.off = unfit(self._model, cache)
        self._tree = trees(self._model)
        session = self._own._drafter.begin(out.logits.shape[-1])
        began = self._own._clock()
        while not stopped:
            stopped = self._pass(session, cache, pad, streamer)
        self.report.decode_s = self._own._clock() - began
        self.report.plain_pass_s = self._own._pace.plain_s
        if streamer is not None:
            streamer.end()
        if not self._config.return_dict_in_generate:
            return self._ids
        return GenerateDecoderOnlyOutput(
            sequences=self._ids, scores=None if self._scores is None else tuple(self._scores),
            logits=None if self._logits is None else tuple(self._logits), **passing(cache),
        )  # fmt: skip

    def _pass(self, session: Any, cache: Any, pad: int, streamer: Any) -> bool:
        pace, clock = self._own._pace, self._own._clock
        began = clock()
        draft = NOTHING
        left = (self._config.max_length or self._ids.shape[1] + DEPTH) - self._ids.shape[1] - 1
        if self.report.off is None and left > 0 and pace.drafts():
            ids = self._ids[0, pad:].tolist()
            draft = session.draft(ids, min(self._own._depth, left), self._own._nodes, self._sample)
            if not self._tree and not draft.is_chain:
                raise InvalidArgument(f"a {type(self._model).__name__} takes no tree; draft a chain")
            self.report.draft_s += clock() - began
        logits = score(self._model, cache, int(self._ids[0, -1]), draft, pad)
        path = self._choose(draft, logits)
        keep(cache, draft, path.nodes)
        if draft.tokens:
            pace.drafted(clock() - began, len(path.tokens))
        else:
            pace.plain(clock() - began)
        self.report.passes += 1
        self.report.drafted_passes += bool(draft.tokens)
        self.report.drafted += len(draft.tokens)
        self.report.accepted += len(path.nodes)
        held = self._ids.shape[1]
        stopped = self._take(path, streamer)
        unused = len(path.tokens) - (self._ids.shape[1] - held)  # behind the end of the text
        for layer in cache.layers if unused else ():
            cut(layer, unused)
        return stopped

    def _choose(self, draft: Draft, logits: torch.Tensor) -> Path:
        """The tokens that plain decoding might choose next. logits: of each node."""
        raw: list[torch.Tensor] = []
        processed: list[torch.Tensor] = []

        def scores(node: int, before: Any) -> torch.Tensor:
            new = self._ids.new_tensor([list(before)])
            ids = torch.cat([self._ids, new], -1) if len(before) else self._ids
            raw.append(logits[None, node].to(copy=True, dtype=torch.float32, device=ids.device))
            processed.append(self._processor(ids, raw[-1]))
            return processed[-1][0]

        def chosen(node: int, before: Any) -> int:
            found = scores(node, before)
            if self._sample is None:
                return int(found.argmax())
            return int(torch.multinomial(found.softmax(-1), 1))

        if self._sample is not None and draft.shares:
            path = reject(draft, lambda node, before: scores(node, before).softmax(-1))
        else:
            path = match(draft, chosen)
        self._pending = raw, processed
        return path

    def _take(self, path: Path, streamer: Any) -> bool:
        """Tells of the tokens one by one, until somebody says that it is enough."""
        for token, raw, scores in zip(path.tokens, *self._pending, strict=True):
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], -1)
            if self._logits is not None:
                self._logits.append(raw)
            if self._scores is not None:
                self._scores.append(scores)
            if streamer is not None:
                streamer.put(self._ids[0, -1:].cpu())
            self.report.tokens += 1
            if bool(self._criteria(self._ids, tuple(self._scores or ())).all()):
                return True
        return False
