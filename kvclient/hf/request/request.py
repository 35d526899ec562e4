"""One generate() call against the store: look up, load, let the model compute the rest, publish.

Owns the order of those steps and the way back when a followed writer is lost, or the store fails. Knows
transformers only through the cache it fills. Invariants: at most L-1 of L tokens are handed over, so the
model always computes the last one; and after finish(), however the call ended, no pin and no unsealed block
of it is left.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvclient.blocks.reuse_plan import Segment
from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.cache.indexed import set_positions, with_parts
from kvclient.hf.cache.layer import Memory, StoreLayer, replace_layers
from kvclient.hf.cache.staging import Staged
from kvclient.hf.cache.static import Steps
from kvclient.hf.call import Bypassed, Clock, LoadFailed, Lost, Prompt, Report, read_prompt
from kvclient.hf.connector.load import PrefixMatch, PrefixSource
from kvclient.hf.connector.part import extend_part
from kvclient.hf.decoding.decode_step import Step
from kvclient.hf.model.own_caches import empty_cache
from kvclient.hf.model.states import restore
from kvclient.hf.request.cache_layers import CacheBuilder
from kvclient.hf.request.claims import Claims
from kvclient.hf.request.hit_end import hit_end
from kvclient.hf.request.inside import Inside, search
from kvclient.hf.request.load_or_compute import MIN_TOKENS, PrefillSpeed, WaitBudget
from kvclient.hf.request.options import Options
from kvclient.hf.request.pieces import between_passes, run_in_pieces
from kvclient.hf.request.returned import Returned
from kvclient.hf.request.served_model import ServedModel
from kvclient.hf.request.tolerance import Tolerance
from kvclient.hf.reuse.blend import Blend
from kvclient.hf.reuse.passes import run_passes


class Request:
    """Made when generate() is called; its prefill() runs in the place of the model's own."""

    def __init__(
        self, client: Any, served: ServedModel, options: Options, *, memory: Memory, pace: PrefillSpeed,
        returned: Returned, read: bool, write: bool, padded: bool, started: float,
        unchanged: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.report = Report()
        self._tolerance = Tolerance(self.report, options.raises)
        self._client, self._served_model, self._options = client, served, options
        self._read, self._write = read, write and served.layout_id is not None
        if write and not self._write:
            self.report.write_bypassed = "not_permitted"
        self._memory, self._returned = memory, returned
        self._kept: weakref.ref[Any] | None = None  # a cache whose rows stay what they are
        self._ids: torch.Tensor | None = None  # prompt and answer so far
        self._pace = pace
        self._padded = padded
        self._started, self._unchanged = started, unchanged
        self._clock = Clock()
        self._prompt: Prompt | None = None
        self._patience: WaitBudget | None = None
        self._found: list[PrefixMatch] = []
        self._prefix: PrefixSource | None = None
        self._staged: Staged | None = None  # the same on its way to a GPU
        self._claims: Claims | None = None
        self._inside: Inside | None = None  # what is reused behind the prefix
        self._blend: Blend | None = None
        self._layers: list[StoreLayer] = []
        self._cache: Any = None
        self._hit = 0  # columns that were found
        self._steps: Steps | None = None
        self.step: Step | None = None
        self._beams, self._end = False, None
        self._generated = False  # whether completed blocks of generated text are published
        self._eos: Any = None  # as generate() was told it

    # ---------------------------------------------------------------- the steps

    def prefill(
        self, model: torch.nn.Module, run: Callable[[], Any], input_ids: torch.Tensor, config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """What `run` gives for input_ids [batch, columns], over what the store has; raises what it raises."""
        try:
            self._prompt = read_prompt(model, input_ids, model_kwargs)
            served = self._served_model
            self._prompt.check(config, served.states is not None, self._padded, served.most_tokens)
        except Bypassed as bypassed:
            return self._pass_by(bypassed, run)
        self.report.prompt_tokens = self._prompt.tokens
        self._note_config(config)
        name = self._options.cache_name
        if model_kwargs.get(name) is None:
            model_kwargs[name] = empty_cache(model)
        cache = self._cache = model_kwargs[name]
        saved = dict(model_kwargs)
        for read, follow in ((self._read, self._options.follow), (self._read, False), (False, False)):
            self._begin(model, cache, config, read, follow, input_ids.device)
            began = time.perf_counter()
            try:
                with self._blend or contextlib.nullcontext():
                    outputs = self._run(model, run, input_ids, model_kwargs)
                break
            except Lost:
                self.report.followed_lost += 1
            except LoadFailed as failed:
                if self._options.raises:
                    raise (failed.__cause__ or failed) from None
                self._tolerance.note(failed, time.perf_counter() - began)
            self._give_back()
            model_kwargs.clear()
            model_kwargs.update(saved)
        self._prefilled(time.perf_counter() - began)
        if not self._segments and not self._beams:
            self._kept = weakref.ref(cache)
        if self._steps is not None:
            self._steps.length = self._prompt.length
            self.step = Step(model, cache, self._steps, self._prompt.rows)
        return outputs

    def _pass_by(self, bypassed: Bypassed, run: Callable[[], Any]) -> Any:
        self.report.bypassed = bypassed.reason
        self.report.bypass_detail = bypassed.detail or None
        return run()

    def _run(self, model: Any, run: Callable[..., Any], ids: torch.Tensor, model_kwargs: Any) -> Any:
        """The model's own pass over the rest of the prompt; cut where states are stored."""
        claims = self._claims
        if self._blend is not None:
            outputs = run_passes(model, self._blend, run)
            if self._served_model.grouped and claims is not None:
                self._tolerance.tried(claims.computed, self._cache, self._segments[0].start)
            return outputs
        if not self._served_model.grouped or claims is None:
            return run()
        at = functools.partial(self._tolerance.tried, claims.computed, self._cache)
        if claims.snapshots is None:
            outputs, _ = run(), at(ids.shape[1])
            return outputs
        how = {"whole": bool(self._layers), "stepwise": self._served_model.stepwise}
        return run_in_pieces(run, ids, model_kwargs, self._hit, claims.snapshots.columns, at, **how)

    def token(self, input_ids: torch.Tensor) -> None:
        """A token was chosen in each row; input_ids [batch, columns] has it as its last column."""
        self._ids = input_ids
        if not self.report.ttft_s:
            if input_ids.device.type != "cpu":
                input_ids[:, -1].cpu()  # the token exists when the device has computed it
            self.report.ttft_s = time.perf_counter() - self._started
        if self._generated:
            assert self._claims is not None and self._prompt is not None
            new = (input_ids, self._prompt.length, self._eos, self._layers, self._cache)
            if not self._tolerance.tried(self._claims.generated, *new):
                self._stop_writing()
            self._note_published()

    def ends_with(self, step: Callable[[], None]) -> None:
        """What is to be undone when the call has ended."""
        self._end = step

    def finish(self) -> None:
        """The call ended, by returning or by an exception. `report` is whole even if this raises."""
        try:
            try:
                if self._generated and self._claims is not None and self._served_model.grouped:
                    self._tolerance.tried(self._claims.ended, self._layers)
                    self._note_published()
            finally:
                self._give_back()
        finally:
            if self._end is not None:
                self._end()
            for layer in self._layers:
                layer.detach_store()
            self._layers, self._cache, self.step = [], None, None
            self._vouch()  # after that: what is alive now is its caller's
            forget_pending()
            self._complete_report()

    def _vouch(self) -> None:
        """For the cache, if the caller has it."""
        cache = self._kept() if self._kept is not None else None
        if cache is None or self._ids is None or self._prompt is None or not self._same():
            return
        self._returned.keep(cache, self._served_model.identity, self._ids, self._prompt.pads)

    def _complete_report(self) -> None:
        if self._prompt is None and self.report.bypassed is None:
            self.report.bypassed = "no_prefill"  # assisted decoding and custom loops prefill by themselves
        self.report.publish_s = self._clock.publish_s
        self.report.total_s = time.perf_counter() - self._started

    # ---------------------------------------------------------------- before the forward pass

    def _note_config(self, config: Any) -> None:
        if self._read and (config.output_attentions or config.output_hidden_states):
            self._read, self.report.read_bypassed = False, "prompt_outputs"  # asked for every prompt token's
        if self._read and config.prefill_chunk_size is not None and not self._options.chunked_reads:
            self._read, self.report.read_bypassed = False, "prefill_chunk_size"
        self._beams = (config.num_beams or 1) > 1
        publishes = self._options.publish_generated and self._options.publish_tokens is None
        self._generated = self._write and publishes and not self._beams
        self._eos = config.eos_token_id

    def _begin(
        self, model: Any, cache: DynamicCache, config: Any, read: bool, follow: bool, device: torch.device
    ) -> None:
        """Opens; where the store fails, as if it had nothing and took nothing."""
        if not self._tolerance.tried(self._open, model, cache, config, read, follow, device):
            self._stop_writing()
            self._give_back()
            self._open(model, cache, config, False, False, device)

    def _stop_writing(self) -> None:
        self._write = self._generated = False
        for layer in self._layers:
            layer.written = None
        if self._claims is not None:
            self._tolerance.tried(self._claims.abort)

    def _open(
        self, model: Any, cache: DynamicCache, config: Any, read: bool, follow: bool, device: torch.device
    ) -> None:
        """Finds, claims, and fills the cache with layers that load on demand."""
        assert self._prompt is not None
        began, served, options = time.perf_counter(), self._served_model, self._options
        if served.grouped:
            cache.layers[:] = empty_cache(model).layers  # no state of a try that was given up, or failed
        self._claims = claims = Claims(self._client, served, options, self._clock, self._same)
        self._found = found = [PrefixMatch.of(text, options.chunker, served) for text in self._prompt.groups]
        tails = served.tails or (options.tails and served.looks_for_tails(options, device))
        if served.grouped and (len(found) > 1 or served.form.holds_marks):
            follow = False  # what one text waits for, another of the batch may be about to compute
        claimed: set[bytes] = set()
        for prefix in found:
            if read:
                prefix.extend(self._client, len(prefix.chain), follow)
                prefix.extend_from_below(self._client, follow, self._worth_waiting_s)
            if read and tails:
                extend_part(prefix, self._client, self._worth_waiting_s)
            if not served.grouped:
                self._search(prefix, config, read)
            if self._write and not served.grouped:
                rounded = self._inside and self._inside.rounded
                claims.claim_text(prefix, self._segments, claimed, read, follow, len(found) > 1, rounded)
            if claims.sinks is not None:
                claims.sinks.take(prefix)
        if len(found) > 1 and claims.claimed:
            for prefix in found:
                prefix.drop_pending()  # two batches that wait for blocks of each other would wait for ever
        columns = min(self._prompt.length - 1, *(prefix.group.pad + prefix.tokens for prefix in found))
        if served.grouped:
            columns = self._hit_end(columns, follow, config, read)
        self._hit = columns
        self.report.inside_keys = b"" if self._inside is None else self._inside.keys  # of this try
        claims.loaded(columns)
        self._prefix = PrefixSource(found, columns, options.follow_timeout_s, self._clock)
        if self._prefix.tokens == 0:
            self._prefix = None
        if inside := self._segments:
            assert served.non_prefix is not None and self._inside is not None
            of = (columns, self._prompt.length, self._clock, served.form, self._inside.windows)
            exact = self._inside.exact_until(served, found[0], options.publish_tokens if self._write else 0)
            self._blend = Blend(served.non_prefix, inside, *of, self._inside.rounded, exact)
        self._fill(cache, config, device)
        self.report.lookup_s += time.perf_counter() - began

    def _hit_end(self, most: int, follow: bool, config: Any, read: bool) -> int:
        """The column that the hit ends at, where not all layers need all tokens; claims what is missing."""
        assert self._claims is not None and self._prompt is not None
        found, stall_s = self._found, self._options.follow_timeout_s
        column = hit_end(self._client, found, most, follow, self._worth_waiting_s, stall_s)
        for prefix in found:
            self._search(prefix, config, read, column - prefix.group.pad)
        for prefix in found if self._write else ():
            self._claims.claim_ends(prefix, found, column, self._prompt.length - 1, self._segments)
        for prefix in found:
            prefix.ends_at(column - prefix.group.pad)
        return column

    def _same(self) -> bool:
        """Whether the model is still the one whose identity the blocks would have."""
        if self.report.write_bypassed is None and not self._unchanged():
            self.report.write_bypassed = "changed"
        return self.report.write_bypassed != "changed"

    @property
    def _segments(self) -> list[Segment]:
        """Stretches behind the prefix that are reused."""
        return [] if self._inside is None else self._inside.segments

    def _search(self, prefix: PrefixMatch, config: Any, read: bool, exact: int | None = None) -> None:
        """Stretches behind the prefix that are stored, but were computed behind other tokens. exact: where
        the prefix that is used ends; None: with what was found."""
        served, options = self._served_model, self._options
        alone = self._prompt is not None and len(self._prompt.groups) == 1 and not prefix.group.pad
        wanted = read and alone and options.search and config.prefill_chunk_size is None
        if not wanted or served.non_prefix is None or (reuse := served.inside(self.report)) is None:
            return
        of = (options.chunker, prefix, prefix.tokens if exact is None else exact, self._worth_waiting_s)
        self._inside = search(self._client, served, reuse, self.report, *of)

    def _worth_waiting_s(self, tokens: int, blocks: int, on_peers: int = 0) -> float:
        """How long so many blocks below are worth waiting for, of which so many lie on other hosts."""
        if self._patience is None:
            assert self._prompt is not None
            self._patience = WaitBudget(self._pace, self._client, self._prompt.tokens)
        size = self._served_model.form.layout(self._options.chunker.most).block_bytes()
        wait_s = self._patience.wait_s(tokens, (blocks - on_peers) * size, on_peers * size)
        self.report.disk_refused += wait_s == 0
        return wait_s

    def _fill(self, cache: DynamicCache, config: Any, device: torch.device) -> None:
        assert self._prompt is not None and self._claims is not None
        builder = CacheBuilder(
            self._options, self._served_model, self._prompt, self._found, self._prefix,
            self._blend, self.report,
        )  # fmt: skip
        self._layers = builder.layers(config, device, self._told(config), self._memory)
        self._staged, self._steps = builder.staged, builder.steps
        served = self._served_model
        replace_layers(cache, with_parts(self._layers, served.layers) if served.groups else self._layers)
        if served.positions[0]:
            set_positions(cache, served.positions, self._hit, self._prompt.rows, device)
        if served.states is not None and self._hit:
            rows = {row: prefix.states.tensors for prefix in self._found for row in prefix.group.rows}
            restore(cache, served.states.states, [rows[row] for row in sorted(rows)], device)

    def _told(self, config: Any) -> Callable[..., None] | None:
        """Who is told of new columns, as long as the store takes them. What a chunk completes is sealed."""
        if (claims := self._claims) is None or (written := claims.written()) is None:
            return None

        def tried(act: Callable[..., Any], *arguments: Any) -> None:
            if not self._tolerance.tried(act, *arguments):
                self._stop_writing()

        tell, behind = functools.partial(tried, written), functools.partial(tried, claims.seal, False)
        return tell if config.prefill_chunk_size is None else between_passes(tell, behind)

    # ---------------------------------------------------------------- after it

    def _prefilled(self, forward_s: float) -> None:
        assert self._prompt is not None and self._claims is not None
        report, clock = self.report, self._clock
        report.load_s, report.wait_s = clock.load_s, clock.wait_s
        report.prefill_s = max(0.0, forward_s - clock.load_s - clock.wait_s - clock.publish_s)
        if self._prefix is not None:
            report.note_prefix(self._prefix, self._found)
        if self._blend is not None:
            report.approximate_tokens = self._blend.found * self._prompt.rows
            report.recomputed_tokens = self._blend.recomputed * self._prompt.rows
            report.estimated_kl, report.exact = self._blend.estimated_kl, False
            report.approximate_from_disk = self._inside.from_disk if self._inside is not None else 0
        elif (computed := report.prompt_tokens - report.reused_tokens) >= MIN_TOKENS and report.prefill_s > 0:
            self._pace.note(computed, report.prefill_s)
        report.rows = self._prompt.reports(self._prefix, self._blend, self._found)
        self._let_go()
        if not self._tolerance.tried(self._claims.seal):
            self._stop_writing()
        self._note_published()
        for layer in self._layers:
            layer.written = None
        segments = self._segments
        self._generated &= not (segments and self._served_model.grouped)  # of windows, nobody's prefix
        if self._generated:
            self._claims.follow(self._found, self._inside)

    def _note_published(self) -> None:
        assert self._claims is not None
        self._claims.note_published(self.report)

    def _give_back(self) -> None:
        try:
            if self._claims is not None:
                self._tolerance.tried(self._claims.abort)
        finally:
            self._let_go()
            self._prefix = self._blend = self._inside = None

    def _let_go(self) -> None:
        """Of all that was pinned to be read."""
        with contextlib.ExitStack() as every:  # each, whatever becomes of the others
            found = (prefix.release for prefix in self._found)
            inside = () if self._inside is None else (self._inside.release,)
            for step in (self._close_staged, *inside, *found):
                every.callback(self._tolerance.tried, step)

    def _close_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()
