"""One generate() call against the store: look up, load, let the model compute the rest, publish.

Owns the order of those steps and the way back when a followed writer is lost. Knows transformers only through
the cache it fills. Invariants: at most L-1 of L tokens are handed over, so the model always computes the last
one; and after finish(), however the call ended, no pin and no unsealed block of it is left.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvclient.blocks.cover import APPROXIMATE, Plan, Segment, plan
from kvclient.hf.attention.layer import InPlaceLayer, forget_pending
from kvclient.hf.attention.registered import count_fallback
from kvclient.hf.blend import Blend, BlendLayer, Interior
from kvclient.hf.cache import Shape, StoreLayer, recycled, replace_layers
from kvclient.hf.form import Form
from kvclient.hf.memory import Memory
from kvclient.hf.pace import Pace
from kvclient.hf.prefix import Clock, Found, Lost, Prefix
from kvclient.hf.prompt import Bypassed, Prompt, read_prompt
from kvclient.hf.publish import Publisher
from kvclient.hf.report import Report
from kvclient.hf.sinks import SinkForm, Sinks

MIN_TAIL = 1 / 8  # of a block: what is left behind the last whole one is worth a block of its own
SPARE_TOKENS = 1024  # room for new tokens taken at once; a longer generation grows its memory


@dataclass(frozen=True)
class Subject:
    """The model as the store sees it: what was found out at attach, valid until the model changes."""

    identity: bytes
    layout_id: int | None  # None: this client may only read
    form: Form  # how its K and V lie in blocks
    interior: Interior | None = None  # None: only prefixes are reused
    sinks: SinkForm | None = None  # None: blocks hold what was computed


@dataclass(frozen=True)
class Options:
    block_tokens: int
    priority: int
    ttl_s: float | None
    follow: bool
    follow_timeout_s: float
    publish_generated: bool
    in_place: bool  # the model's attention reads blocks where they lie
    chunked_reads: bool  # this transformers can prefill in chunks behind a filled cache
    publish_tokens: int | None = None  # of a prompt, at most; None: all, and generated text


class Request:
    """Made when generate() is called; its prefill() runs in the place of the model's own."""

    def __init__(
        self, client: Any, subject: Subject, options: Options, make_chain: Callable[..., Any], memory: Memory,
        pace: Pace, read: bool, write: bool, padded: bool, started: float,
    ) -> None:  # fmt: skip
        self.report = Report()
        self._client, self._subject, self._options, self._make_chain = client, subject, options, make_chain
        self._read, self._write = read, write and subject.layout_id is not None
        if write and not self._write:
            self.report.write_bypassed = "not_permitted"
        self._memory = memory
        self._pace = pace
        self._padded = padded
        self._started = started
        self._clock = Clock()
        self._prompt: Prompt | None = None
        self._found: list[Found] = []
        self._prefix: Prefix | None = None
        self._publisher: Publisher | None = None
        self._sinks: Sinks | None = None
        self._plan: Plan | None = None
        self._blend: Blend | None = None
        self._layers: list[StoreLayer] = []
        self._next_block: list[int] = []  # per row, of its text: the first block not yet offered
        self._generated = False  # whether completed blocks of generated text are published
        self._eos: list[int] = []

    # ---------------------------------------------------------------- the steps

    def prefill(
        self, model: torch.nn.Module, run: Callable[[], Any], input_ids: torch.Tensor, config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        try:
            self._prompt = read_prompt(model, input_ids, model_kwargs)
            if not self._padded and any(group.pad for group in self._prompt.groups):
                raise Bypassed("padding", "the self-test found it wrong with this model")
        except Bypassed as bypassed:
            self.report.bypassed = bypassed.reason
            return run()
        self.report.prompt_tokens = self._prompt.tokens
        self._note_config(config)
        if model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = DynamicCache(config=model.config.get_text_config(decoder=True))
        saved = dict(model_kwargs)
        for read, follow in ((self._read, self._options.follow), (self._read, False), (False, False)):
            self._open(model_kwargs["past_key_values"], config, read, follow, input_ids.device)
            began = time.perf_counter()
            try:
                with self._blend or contextlib.nullcontext():
                    outputs = run()
                break
            except Lost:
                self.report.followed_lost += 1
                self._give_back()
                model_kwargs.clear()
                model_kwargs.update(saved)
        self._prefilled(time.perf_counter() - began)
        return outputs

    def token(self, input_ids: torch.Tensor) -> None:
        """A token was chosen in each row; `input_ids` has it as its last column."""
        if not self.report.ttft_s:
            if input_ids.device.type != "cpu":
                input_ids[:, -1].cpu()  # the token exists when the device has computed it
            self.report.ttft_s = time.perf_counter() - self._started
        if self._generated:
            self._publish_generated(input_ids)

    def finish(self) -> Report:
        """The call ended, by returning or by an exception."""
        self._give_back()
        for layer in self._layers:
            layer.detach_store()
        self._layers = []
        forget_pending()
        if self._prompt is None and self.report.bypassed is None:
            self.report.bypassed = "no_prefill"  # assisted decoding and custom loops prefill by themselves
        self.report.publish_s = self._clock.publish_s
        self.report.total_s = time.perf_counter() - self._started
        return self.report

    # ---------------------------------------------------------------- before the forward pass

    def _note_config(self, config: Any) -> None:
        if self._read and (config.output_attentions or config.output_hidden_states):
            self._read, self.report.read_bypassed = False, "prompt_outputs"  # asked for every prompt token's
        if self._read and config.prefill_chunk_size is not None and not self._options.chunked_reads:
            self._read, self.report.read_bypassed = False, "prefill_chunk_size"
        beams = (config.num_beams or 1) > 1
        publishes = self._options.publish_generated and self._options.publish_tokens is None
        self._generated = self._write and publishes and not beams
        eos = config.eos_token_id
        self._eos = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]

    def _open(self, cache: DynamicCache, config: Any, read: bool, follow: bool, device: torch.device) -> None:
        """Finds, claims, and fills the cache with layers that load on demand."""
        assert self._prompt is not None
        began = time.perf_counter()
        subject, options = self._subject, self._options
        self._publisher = self._make_publisher(subject.layout_id, subject.form)
        if subject.sinks is not None:
            own = self._make_publisher(subject.sinks.layout_id, subject.sinks.form)
            self._sinks = Sinks(subject.sinks, self._client, self._make_chain, own)
        self._found = found = [
            Found(
                group,
                self._make_chain(subject.identity, group.tokens, options.block_tokens),
                subject.form,
                subject.form.layers,
            )
            for group in self._prompt.groups
        ]
        claimed: set[bytes] = set()
        for one in found:
            if read:
                one.extend(self._client, len(one.chain), follow)
                block_bytes = subject.form.layout(options.block_tokens).block_bytes()
                if not one.extend_from_disk(self._client, follow, self._pace, block_bytes):
                    self.report.disk_refused += 1
            if read and subject.interior is not None:
                one.extend_part(self._client)
            if self._sinks is not None:
                self._sinks.open(one, self._write and options.publish_tokens is None)
            inside = self._search(one, config) if read else []
            if self._write:
                # What is computed behind approximate tokens is nobody's prefix.
                limit = inside[0].start if inside else len(one.group.tokens)
                if options.publish_tokens is not None:
                    limit = min(limit, options.publish_tokens)
                self._claim(one, read, follow, claimed, limit // options.block_tokens)
                if subject.interior is not None and limit == len(one.group.tokens):
                    self._claim_tail(one)
        if len(found) > 1 and self._publisher.claimed:
            for one in found:
                one.drop_pending()  # two batches that wait for blocks of each other would wait for ever
        columns = min(self._prompt.length - 1, *(one.group.pad + one.tokens for one in found))
        self._publisher.loaded = columns
        self._prefix = Prefix(found, columns, subject.form.layers, options.follow_timeout_s, self._clock)
        if self._prefix.tokens == 0:
            self._prefix = None
        if inside:
            assert subject.interior is not None
            self._blend = Blend(
                subject.interior, inside, columns, self._prompt.length, self._clock, subject.form
            )
        self._fill(cache, config, device)
        self.report.lookup_s += time.perf_counter() - began

    def _make_publisher(self, layout_id: int | None, form: Form) -> Publisher:
        layout_id = -1 if layout_id is None else layout_id
        options = self._options
        return Publisher(
            self._client, layout_id, form.layers, options.priority, options.ttl_s, self._clock, form
        )

    def _written(self) -> Callable[..., None] | None:
        """Who is told of new columns."""
        both = [self._publisher, self._sinks.publisher if self._sinks is not None else None]
        told = [publisher.written for publisher in both if publisher is not None and publisher.claimed]
        if len(told) < 2:
            return told[0] if told else None

        def written(*columns: Any) -> None:
            for tell in told:
                tell(*columns)

        return written

    def _search(self, one: Found, config: Any) -> list[Segment]:
        """Stretches behind the prefix that are stored, but were computed behind other tokens."""
        assert self._prompt is not None
        interior, last = self._subject.interior, len(one.group.tokens) - 1
        exact = min(one.tokens, last)
        if (
            interior is None
            or len(self._prompt.groups) > 1
            or one.group.pad
            or config.prefill_chunk_size is not None
        ):
            return []
        self._plan = plan(
            self._client,
            self._subject.identity,
            one.group.tokens[:last],
            self._options.block_tokens,
            exact_tokens=exact,
            min_tokens=interior.repair.min_tokens,
        )
        return [
            segment
            for segment in self._plan
            if segment.kind == APPROXIMATE
            and all(one.form.fits(p.view, p.view.tokens, one.layers - 1) for p in segment.pieces)
        ]

    def _claim(self, one: Found, read: bool, follow: bool, claimed: set[bytes], limit: int) -> None:
        """Claims what is missing of the first `limit` blocks. What others hold or just sealed is taken along
        instead.
        """
        assert self._publisher is not None
        assert self._prompt is not None
        first = len(one.views)
        if len(self._prompt.groups) > 1:
            keys = one.chain.keys
            while first < len(keys) and keys[first] in claimed:
                first += 1  # an earlier row of this batch computes it
        if first >= limit:
            return
        results = self._publisher.claim(one.chain[:limit], first, one.group.rows[0], one.group.pad)
        run = next((i for i, word in enumerate(results) if word not in ("exists", "pending")), len(results))
        if read and run and first == len(one.views):
            one.extend(self._client, first + run, follow)
        if len(self._prompt.groups) > 1:
            claimed.update(keys[first + i] for i, word in enumerate(results) if word == "granted")

    def _claim_tail(self, one: Found) -> None:
        """Claims a shorter block for the tokens behind the last whole one: what is found at any shift ends
        anywhere. It goes first when memory is short: a longer text makes it superfluous.
        """
        assert self._publisher is not None
        size, step = self._options.block_tokens, self._subject.form.step
        left = len(one.group.tokens) % size // step * step
        if len(one.chain) and left >= MIN_TAIL * size:
            tokens = one.group.tokens[: len(one.chain) * size + left]
            chain = self._make_chain(self._subject.identity, tokens, size, partial=True)
            rows, pad = one.group.rows, one.group.pad
            self._publisher.claim(chain, len(chain) - 1, rows[0], pad, self._options.priority // 2)

    def _fill(self, cache: DynamicCache, config: Any, device: torch.device) -> None:
        assert self._prompt is not None
        subject, length = self._subject, self._prompt.length
        wanted = config.max_length if isinstance(config.max_length, int) else length + SPARE_TOKENS
        capacity = max(length, min(wanted, length + SPARE_TOKENS))
        in_place = self._in_place(device)
        if in_place and self._prefix is not None:
            capacity -= self._prefix.columns  # a layer then holds what is computed, and no more
        form = subject.form
        shape = Shape(self._prompt.rows, form.heads, form.head_dim, form.dtype, device, capacity)
        written = self._written()
        make: Callable[..., StoreLayer] = StoreLayer
        if self._blend is not None:
            make = functools.partial(BlendLayer, self._blend)
        elif in_place:
            forget_pending()
            pads = [pad for _, pad in sorted((row, g.pad) for g in self._prompt.groups for row in g.rows)]
            make = functools.partial(InPlaceLayer, pads=pads, left=count_fallback)
        self._layers = [
            make(index, shape, self._prefix, written, memory)
            for index, memory in enumerate(recycled(self._memory, shape, form.layers))
        ]
        replace_layers(cache, self._layers)

    def _in_place(self, device: torch.device) -> bool:
        if not self._options.in_place or self._blend is not None or device.type != "cpu":
            return False
        if any(one.part is not None for one in self._found):
            count_fallback("part")  # its tokens go into a block together with what follows
            return False
        return True

    # ---------------------------------------------------------------- after it

    def _prefilled(self, forward_s: float) -> None:
        assert self._prompt is not None
        assert self._publisher is not None
        report, clock = self.report, self._clock
        report.load_s, report.wait_s = clock.load_s, clock.wait_s
        report.prefill_s = max(0.0, forward_s - clock.load_s - clock.wait_s - clock.publish_s)
        if self._prefix is not None:
            report.reused_tokens = self._prefix.tokens
            from_disk = min(self._prefix.tokens, sum(f.disk_tokens * len(f.group.rows) for f in self._found))
            report.reused_by_tier.update(shm=self._prefix.tokens - from_disk, disk=from_disk)
            report.followed_tokens = self._prefix.followed_tokens
        if self._blend is not None:
            report.approximate_tokens = self._blend.found * self._prompt.rows
            report.recomputed_tokens = self._blend.recomputed * self._prompt.rows
            self._generated = False  # what follows approximate tokens is nobody's prefix
        else:
            self._pace.note(report.prompt_tokens - report.reused_tokens, report.prefill_s)
        for one in self._found:
            one.release()
        self._release_plan()
        self._publisher.seal()
        if self._sinks is not None:
            self._sinks.publisher.seal()
        self._note_published()
        for layer in self._layers:
            layer.written = None
        size = self._options.block_tokens
        self._next_block = [0] * self._prompt.rows
        for group in self._prompt.groups:
            for row in group.rows:
                self._next_block[row] = len(group.tokens) // size

    def _publish_generated(self, input_ids: torch.Tensor) -> None:
        assert self._prompt is not None
        assert self._publisher is not None
        columns = input_ids.shape[1] - 1  # the newest token has no KV yet
        size = self._options.block_tokens
        for group in self._prompt.groups:
            for row in group.rows:
                stop = group.pad + (self._next_block[row] + 1) * size
                if stop > columns:
                    continue
                self._next_block[row] += 1
                storages = [(layer.storage, layer.origin) for layer in self._layers]
                tokens = input_ids[row, group.pad : stop].to("cpu", torch.int32).numpy()
                ended = any(int(token) in self._eos for token in tokens[len(group.tokens) :])
                if ended or any(s is None or s.shape[1] != self._prompt.rows for s, _ in storages):
                    continue  # behind the end of its text, or the cache is no longer row by row ours
                chain = self._make_chain(self._subject.identity, tokens, size)
                self._publisher.publish(chain, len(chain) - 1, row, group.pad, storages)
                self._note_published()

    def _note_published(self) -> None:
        assert self._publisher is not None
        self.report.published_blocks = self._publisher.published
        self.report.no_space = self._publisher.no_space
        self.report.not_quantisable = self._publisher.not_quantisable

    def _give_back(self) -> None:
        if self._publisher is not None:
            self._publisher.abort()
        if self._sinks is not None:
            self._sinks.publisher.abort()
        for one in self._found:
            one.release()
        self._release_plan()
        self._prefix = self._blend = None

    def _release_plan(self) -> None:
        if self._plan is not None:
            self._plan.release()
            self._plan = None
