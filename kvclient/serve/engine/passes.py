"""Passes through the model for the loop: a step of all that run, the scores of a prompt; and undoing one.

Owns nothing: it borrows the jobs' caches. Never chooses a token and tells nobody. Invariant: a pass that
fails leaves behind what cut_back() takes away.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvclient.errors import InvalidArgument
from kvclient.hf import layers
from kvclient.hf.attachment.attach import Attachment
from kvclient.hf.cache.device import DeviceLayer
from kvclient.hf.cache.ragged import RaggedLayer, step
from kvclient.hf.cache.ragged_device import Known, RaggedDeviceLayer
from kvclient.hf.model.own_caches import empty_cache, keeps_states
from kvclient.hf.release import passing
from kvclient.hf.request.continuation import Opened
from kvclient.hf.speculation import Draft, score
from kvclient.serve.engine.job import Job
from kvclient.serve.engine.sampling import Chosen, chosen

FED_IN_PIECES = (DynamicLayer, DynamicSlidingWindowLayer)
SCORED_TOKENS = 512  # whose logits are held at a time
RATE_TOKENS = 64  # computed in one call: fewer say little about a prompt's cost a token


class Passes:
    """Of one model, whose layers kvclient.hf.layers computes from now on. `token_s`: seconds of computing one
    token of a prompt, lately; 0: not known yet.
    """

    def __init__(self, model: torch.nn.Module, kv: Attachment) -> None:
        """Raises InvalidArgument for a model that cannot have several requests under way."""
        if keeps_states(model):
            what = f"{type(model).__name__} keeps its recurrent states in its modules, of one request"
            raise InvalidArgument(f"{what}: several requests under way would overwrite each other's")
        layers.install(model)
        self._model, self._kv, self.token_s = model, kv, 0.0
        self._tables: dict[int, Known] = {}  # of the last step on a GPU

    @property
    def ragged(self) -> bool:
        """Whether requests of any lengths go through the model side by side. Not where layers attend in
        chunks (Llama 4): that is in masks alone, and a step has none.
        """
        state, devices = self._kv._model_state, ("cpu", DeviceLayer.device_type)
        in_place = state.options.in_place is not None and self._model.device.type in devices
        return in_place and not any(group.chunked for group in state.kv.groups)

    def step(
        self, jobs: Sequence[Job], drafts: Sequence[Draft], joined: Sequence[Opened] = ()
    ) -> list[torch.Tensor]:
        """The logits behind the newest token of each job and behind those of its draft; then of each prompt
        that joined, [1, vocabulary], whose cache then holds it.
        """
        fed = [[job.tokens[-1], *draft.tokens] for job, draft in zip(jobs, drafts, strict=True)]
        if not self.ragged:
            return [score(self._model, job.cache, job.tokens[-1], draft).cpu()
                    for job, draft in zip(jobs, drafts, strict=True)]  # fmt: skip
        rests = [opened.rest for opened in joined]
        caches = [*(job.cache for job in jobs), *(opened.cache for opened in joined)]
        wanted = [*map(len, fed), *(1 for _ in rests)]
        began = time.perf_counter()
        make: Callable[..., Any] = RaggedLayer
        if self._model.device.type == DeviceLayer.device_type:
            make = functools.partial(RaggedDeviceLayer, tables=self._tables)
        told = step(self._model, [*fed, *rests], caches, wanted, make)
        logits = [rows.cpu() for rows in told]  # behind which a GPU has computed them
        tokens = sum(map(len, rests))
        own_s = (time.perf_counter() - began) * tokens / max(1, tokens + len(fed))
        self.note_rate(tokens, own_s)
        for opened, rest in zip(joined, rests, strict=True):
            opened.computed(own_s * len(rest) / tokens)
        return logits

    def generated(self, ids: torch.Tensor) -> Any:
        """What generate() gives for a prompt [1, tokens]: its cache, and the logits behind it."""
        config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=1, pad_token_id=0, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True, use_cache=True,
        )  # fmt: skip
        return self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    def prompt_logprobs(self, job: Job, ids: torch.Tensor) -> tuple[Chosen | None, ...]:
        """Of each token of the prompt, ids [1, tokens]: a pass of its own, as scoring wants all logits; of
        SCORED_TOKENS at a time, for those of a long prompt are larger than the model, but where layers keep
        states, which go on token by token only. None of one that comes again: they were told."""
        if job.tokens:
            return ()
        told: list[Chosen | None] = [None]
        cache = _of_pieces(self._model) if ids.shape[1] > SCORED_TOKENS else None
        for piece in (ids,) if cache is None else ids.split(SCORED_TOKENS, dim=1):
            if job.cancelled:
                return ()
            held = {} if cache is None else passing(cache, self._model)
            out = type(self._model).forward(self._model, input_ids=piece, use_cache=bool(held), **held)
            for row in out.logits[0]:
                if len(told) < len(job.prompt):  # what is behind the last is of the answer
                    told.append(chosen(row.float(), job.prompt[len(told)], job.prompt_logprobs or 0))
        return tuple(told)

    def note_rate(self, tokens: int, seconds: float) -> None:
        """Of a call of which the prompt's tokens are most of the work."""
        if tokens >= RATE_TOKENS:
            rate = seconds / tokens
            self.token_s = 0.75 * self.token_s + 0.25 * rate if self.token_s else rate

    def cold_s(self, tokens: int) -> float | None:
        """What computing so many tokens would take; None: not known yet."""
        return self.token_s * tokens or None


def _of_pieces(model: torch.nn.Module) -> Any:
    """An empty cache that a prompt can be fed to in pieces; None: this model's cannot."""
    cache = empty_cache(model)
    return cache if all(type(layer) in FED_IN_PIECES for layer in cache.layers) else None


def cut_back(*jobs: Any) -> None:
    """Takes away the token that a step which failed left in some of their layers."""
    for job in (job for job in jobs if job.windowing is None):
        length = len(job.prompt) + len(job.tokens) - 1
        for layer in job.cache.layers:
            if (more := layer.get_seq_length() - length) > 0:
                layer.crop(-more)
