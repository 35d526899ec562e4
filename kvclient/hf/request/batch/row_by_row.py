"""A batch whose prompts are reused inside, or rows with padding of layers with states: each is computed by
itself, as a prompt alone is, and what its cache holds is put into the batch's behind its padding.

Owns that order, a request of its own for each different prompt, and what the batch's report says of them.
Never cuts a row's pass. Invariant: a row has the K and V, and the logits, that a call of that prompt alone
would have; two of these requests never hold claims at the same time, so batches never wait for each other.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.attention.registered import count_fallback
from kvclient.hf.cache.layer import replace_layers
from kvclient.hf.call import Bypassed, Group, Prompt, Report, read_prompt
from kvclient.hf.connector.load import PrefixMatch
from kvclient.hf.model.own_caches import empty_cache
from kvclient.hf.model.states import capture, restore
from kvclient.hf.request.cache_layers import CacheBuilder
from kvclient.hf.request.claims import Claims
from kvclient.hf.request.hit_end import hit_end
from kvclient.hf.request.inside import Inside, search
from kvclient.hf.request.load_or_compute import WaitBudget
from kvclient.hf.request.options import Options
from kvclient.hf.request.request import Request

ADDED = (
    "reused_tokens", "approximate_tokens", "approximate_from_disk", "recomputed_tokens", "followed_tokens",
    "lookup_s", "load_s", "wait_s", "prefill_s", "followed_lost", "full_tokens", "disk_refused",
    "store_failed_s",
)  # fmt: skip
PUBLISHED = (
    "published_blocks", "no_space", "unavailable", "lost_blocks", "published_full_blocks",
    "published_group_blocks", "not_quantisable",
)  # fmt: skip
FIRST_SAID = ("store_error", "write_bypassed", "read_bypassed")


class RowByRow(Request):
    """In the place of a Request where a model's prompts are reused inside, or its layers have states."""

    def __init__(self, client: Any, served: Any, options: Options, **call: Any) -> None:
        super().__init__(client, served, options, **call)
        self._call = call
        self._parts: list[tuple[Group, Report, Any]] = []  # rows, what became of them, their cache
        self._states: dict[int, list[torch.Tensor]] = {}  # by row

    def prefill(
        self, model: torch.nn.Module, run: Callable[..., Any], input_ids: torch.Tensor, config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """The model's own pass where a prompt stands alone, or nothing is found inside of any and no state
        stands behind padding; else one for each prompt."""
        prompt = self._several(model, input_ids, config, model_kwargs)
        if prompt is None:
            return super().prefill(model, run, input_ids, config, model_kwargs)
        self._prompt, self.report.prompt_tokens = prompt, prompt.tokens
        self._note_config(config)
        name, states = self._options.cache_name, self._served_model.states
        if model_kwargs.get(name) is None:
            model_kwargs[name] = empty_cache(model)
        saved, cache, inside = dict(model_kwargs), model_kwargs[name], []
        logits: dict[int, torch.Tensor] = {}
        outputs: Any = None
        try:
            for group in prompt.groups:
                row_request = self._of_one()
                rows, alone = input_ids[group.rows, group.pad :], None
                model_kwargs.clear()
                model_kwargs.update({**_of_rows(saved, group, prompt.length), name: None})
                try:
                    pass_over = functools.partial(self._pass, row_request, run, rows)
                    outputs = row_request.prefill(model, pass_over, rows, config, model_kwargs)
                    inside.append(row_request._inside)
                    alone = model_kwargs[name]
                    for number, row in enumerate(group.rows if states is not None else ()):
                        self._states[row] = capture(alone, states.states, number)
                finally:
                    row_request.finish()
                    self._parts.append((group, row_request.report, alone))
                logits.update(zip(group.rows, outputs.logits[:, -1:], strict=True))
        finally:
            model_kwargs.clear()
            model_kwargs.update(saved)
        self._cache = cache
        self._join(model, config, input_ids.device)
        self._answers(inside)
        told = {"logits": torch.stack([logits[row] for row in sorted(logits)]), name: cache}
        return type(outputs)(**{key: value for key, value in told.items() if _has(outputs, key)})

    # ---------------------------------------------------------------- before

    def _several(
        self, model: torch.nn.Module, input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any]
    ) -> Prompt | None:
        """The prompts, if they are to be computed one by one."""
        served, options = self._served_model, self._options
        asked = config.output_attentions or config.output_hidden_states or config.prefill_chunk_size
        states = served.states is not None
        inside = self._read and options.search and served.non_prefix is not None
        if asked or not (states or (inside and served.inside(self.report) is not None)):
            return None
        try:
            prompt = read_prompt(model, input_ids, model_kwargs)
            prompt.check(config, False, self._padded, served.most_tokens)
        except Bypassed:
            return None
        if states:
            return prompt if any(prompt.pads) else None
        if len(prompt.groups) == 1 and not prompt.groups[0].pad:
            return None
        self._patience = WaitBudget(self._pace, self._client, prompt.tokens)
        began = time.perf_counter()
        found: list[bool] = []
        self._tolerance.tried(lambda: found.append(any(map(self._found_inside, prompt.groups))))
        self.report.lookup_s += time.perf_counter() - began
        return prompt if found == [True] else None

    def _found_inside(self, group: Group) -> bool:
        served, options = self._served_model, self._options
        assert served.non_prefix is not None
        prefix = PrefixMatch.of(dataclasses.replace(group, pad=0), options.chunker, served)
        try:
            prefix.extend(self._client, len(prefix.chain), False)
            exact, most = prefix.tokens, len(group.tokens) - 1
            if served.grouped:
                waits = self._worth_waiting_s, options.follow_timeout_s
                exact = hit_end(self._client, [prefix], min(most, exact), False, *waits)
            of = (served.non_prefix, self.report, options.chunker, prefix, exact, self._worth_waiting_s)
            inside = search(self._client, served, *of)
            inside.release()
            return bool(inside.segments)
        finally:
            prefix.release()

    def _of_one(self) -> Request:
        """The request of one of the prompts; without the store, once it has failed."""
        failed = any(report.store_error is not None for _, report, _ in self._parts)
        call = {**self._call, "read": False, "write": False} if failed else self._call
        dense = {"in_place": None, "static": False, "pool": None, "publish_generated": False}
        options = dataclasses.replace(self._options, **dense)
        return Request(self._client, self._served_model, options, **call)

    def _pass(
        self, row_request: Request, run: Callable[..., Any], rows: torch.Tensor,
        piece: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Over one of the prompts, or a piece of it; all that is used inside of it is known by now."""
        reports = [*(report for _, report, _ in self._parts), row_request.report]
        self.report.inside_keys = b"".join(report.inside_keys for report in reports)
        return run(rows if piece is None else piece)

    # ---------------------------------------------------------------- behind

    def _join(self, model: torch.nn.Module, config: Any, device: torch.device) -> None:
        """Puts the rows into layers of the batch, and these into its cache."""
        assert self._prompt is not None
        states = self._served_model.states
        if states is not None:
            self._cache.layers[:] = empty_cache(model).layers
        for reason, left in (("inside", self._options.in_place), ("graph_inside", self._options.static)):
            if left:
                count_fallback(reason)
                self.report.dense = reason
        options = dataclasses.replace(self._options, in_place=None, static=False, pool=None)
        builder = CacheBuilder(options, self._served_model, self._prompt, [], None, None, self.report)
        self._layers = builder.layers(config, device, None, self._memory)
        for layer in self._layers:
            parts = [(group, cache.layers[layer.index]) for group, _, cache in self._parts]
            sides = []
            for side in ("keys", "values"):
                first = getattr(parts[0][1], side)
                size = (self._prompt.rows, first.shape[1], self._prompt.length, first.shape[3])
                whole = first.new_zeros(size)
                for group, part in parts:
                    whole[group.rows, :, group.pad :] = getattr(part, side)
                sides.append(whole)
            layer.update(*sides)
            for _, part in parts:
                part.reset()
        replace_layers(self._cache, self._layers)
        if states is not None:
            told = [self._states[row] for row in sorted(self._states)]
            restore(self._cache, states.states, told, device)
            self._states.clear()

    def _answers(self, inside: list[Inside | None]) -> None:
        """From here on what the rows say is published. inside: by group, what was reused inside of it."""
        served, report, rows = self._served_model, self.report, dict[int, Any]()
        for group, told, _ in self._parts:
            for name in ADDED:
                setattr(report, name, getattr(report, name) + getattr(told, name))
            for name in FIRST_SAID:
                setattr(report, name, getattr(report, name) or getattr(told, name))
            for tier, tokens in told.reused_by_tier.items():
                report.reused_by_tier[tier] += tokens
            self._clock.publish_s += told.publish_s
            rows.update(zip(group.rows, told.rows, strict=True))
        report.rows = [rows[row] for row in sorted(rows)]
        estimated = [row.estimated_kl for row in report.rows if row.estimated_kl is not None]
        report.estimated_kl = max(estimated, default=None)
        report.exact = all(told.exact for _, told, _ in self._parts)
        self._claims = Claims(self._client, served, self._options, self._clock, self._same)
        if report.store_error is not None:
            self._stop_writing()
        for (group, told, _), of_row in zip(self._parts, inside, strict=True):
            windows = of_row and of_row.segments and served.grouped  # nobody's prefix
            if self._generated and not windows:
                self._claims.loaded(group.pad + told.rows[0].reused_tokens if served.grouped else 0)
                self._claims.follow([PrefixMatch.of(group, self._options.chunker, served)], of_row)
        self._claims.loaded(0)
        self._note_published()

    def _note_published(self) -> None:
        super()._note_published()
        for _, told, _ in self._parts:
            for name in PUBLISHED:
                setattr(self.report, name, getattr(self.report, name) + getattr(told, name))


def _has(outputs: Any, name: str) -> bool:
    """Whether what a model gives back has a field of this name: some keep their cache to themselves."""
    return any(field.name == name for field in dataclasses.fields(outputs))


def _of_rows(model_kwargs: dict[str, Any], group: Group, length: int) -> dict[str, Any]:
    """The arguments of a pass over these rows alone, without their padding."""
    changed = dict(model_kwargs)
    if (mask := changed.get("attention_mask")) is not None:
        changed["attention_mask"] = mask[group.rows, group.pad :]
    if (positions := changed.get("position_ids")) is not None:
        changed["position_ids"] = positions[group.rows if len(positions) > 1 else [0], group.pad :]
    if (columns := changed.get("cache_position")) is not None:
        changed["cache_position"] = columns[: length - group.pad]
    return changed
