"""One forward pass over a prompt of which some stretches are reused: in the first layers the tokens that may
be chosen, in the rest those that were; the last layer is computed for the prompt's last token only, but for K
and V. Where the question chooses, or the error is estimated, a pass of the live tokens comes first.

Owns the hooks that cut the rows and the layers that put fresh K and V among reused ones; both work on the
model as it is, of any architecture whose decoder layers stand in one list. Never touches the model's code,
and takes its hooks off when the pass is over. Invariant: every column of every layer holds either what the
model computed in these passes or what a verified block holds, moved to its place (and, where the question
chose, by its neighbours' drift); a row attends to exactly the columns up to its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.blocks.reuse_plan import Segment
from kvclient.errors import InvalidArgument
from kvclient.hf.attention.backends import NAMES
from kvclient.hf.attention.one_row import ONE_ROW
from kvclient.hf.attention.registered import PREFIX, at, implementation
from kvclient.hf.call import Clock, loads
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.rope import Rope
from kvclient.hf.model.structure import Refused
from kvclient.hf.reuse.attention_scores import AttentionScores
from kvclient.hf.reuse.blend_layer import BlendLayer, Seen, compared, place
from kvclient.hf.reuse.drift import Drift
from kvclient.hf.reuse.estimate import LEFT_ROUNDED, Gauge
from kvclient.hf.reuse.products import few_rows, rounds
from kvclient.hf.reuse.repair import Repair
from kvclient.hf.reuse.rounded import RoundedRest
from kvclient.hf.reuse.windows import Windows

# Attention implementations that take a mask of rows and columns. Ours attend by the rows' columns alone.
MASKED = ("sdpa", ONE_ROW, "eager", *map(implementation, NAMES))
MOST_MASK_BYTES = 1 << 30  # for them; every layer reads it
PER_TOKEN = ("position_ids", "cache_position")  # arguments of a decoder layer whose last axis is the tokens'


@dataclass(frozen=True)
class NonPrefixReuse:
    """What reuse inside a prompt needs to know of a model."""

    rope: Rope
    decoder: torch.nn.ModuleList
    repair: Repair
    config: Any  # the model's, which says what computes its attention by now
    refills: bool = False  # behind its last layer the model expects as many rows as tokens (GPT-J)

    @property
    def shows(self) -> bool:
        """Whether the model's attention is one of ours: others tell nobody what they attend to."""
        return str(self.config._attn_implementation).startswith(PREFIX)


def decoder_layers(model: torch.nn.Module, layers: int) -> torch.nn.ModuleList:
    """The list of the model's decoder layers. Raises Refused."""
    name = type(model).__name__
    if model.config._attn_implementation not in MASKED:
        kind = model.config._attn_implementation
        raise Refused(f"{name} computes attention by {kind}: rows that do not follow each other need a mask")
    found = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    if len(found) != 1:
        raise Refused(f"{name} has {len(found)} lists of {layers} modules: which are its layers is not clear")
    return found[0]


def mask_bytes(
    non_prefix: NonPrefixReuse, segments: Sequence[Segment], exact: int, length: int, size: int
) -> int:
    """Of the mask that such a pass needs, with elements of `size` bytes."""
    if non_prefix.shows:
        return 0
    fresh = non_prefix.repair.fresh(segments, length)
    rows = non_prefix.repair.scanned(segments, fresh) if non_prefix.repair.checks else fresh
    return int(rows[exact:].sum()) * length * size


class Blend:
    """One pass. `with` it, run the model's own prefill with `layers` in its cache."""

    def __init__(
        self, non_prefix: NonPrefixReuse, segments: Sequence[Segment], exact: int, length: int, clock: Clock,
        form: BlockFormat, windows: Windows | None = None, rest: RoundedRest | None = None,
        exact_until: int | None = None,
    ) -> None:  # fmt: skip
        """windows: of the layers that are not in `form`; segments are as it fits them. rest: of which
        the one segment is; all that is behind that is computed in one pass. exact_until: the column before
        which rows are others' prefix; None: that of the first segment."""
        self._non_prefix, self._segments, self._clock, self._form = non_prefix, segments, clock, form
        self.exact, self.length, self._windows = exact, length, windows
        self._rest, self.rounded = rest, rest is not None
        self._exact_until = segments[0].start if exact_until is None else exact_until
        self._fresh = _live(segments, length) if self.rounded else non_prefix.repair.fresh(segments, length)
        self._may: torch.Tensor | None = None  # of the reused columns, those that can be computed; None: all
        if windows is not None:
            self._fresh, self._may = windows.computable(segments, self._fresh)
        self.found = sum(map(len, segments))  # columns
        self.recomputed = 0  # of these, in the layers that are cut
        # The first layer that only chosen rows go through. K and V of all scanned ones are looked at there.
        checks = non_prefix.repair.checks and not self.rounded
        self.cut = non_prefix.repair.cut(len(non_prefix.decoder))
        self.looking = False  # while rows enter a layer for their K and V only
        self._scanned = non_prefix.repair.scanned(segments, self._fresh) if checks else self._fresh
        if self._may is not None and non_prefix.repair.ratio < 1:  # else all are, whatever they see
            self._scanned = self._fresh | (self._scanned & self._may)
        # Of this pass's tokens, those that go through the layers so far; chosen ones from `cut` on.
        self._rows = torch.nonzero(self._scanned[exact:]).squeeze(1)
        self.chosen = not checks
        self._mask: torch.Tensor | None = None
        self._hooks: list[Any] = []
        self.asked: AttentionScores | None = None  # while live rows are computed over what is stored
        # Where that pass ended: what stands before all that is reused waits there for the other rows.
        self._joined, self._waiting = -1, torch.empty(0)
        self.drift: Drift | None = None
        # Where the error is estimated, passes follow each other until one is the last.
        everything = non_prefix.repair.computes_all or bool(self._fresh.all())
        self.gauge = None if everything or self.rounded else Gauge.of(non_prefix.repair, segments, length)
        self.stored, self.last = self.gauge is not None, self.gauge is None
        # Of the answer, behind the last pass.
        self.estimated_kl: float | None = LEFT_ROUNDED if self.rounded else None
        self.scored = False  # whether the question chose
        # Rows that need no second pass: all columns before theirs are computed in the first.
        self._front = int((~self._fresh).int().argmax()) - exact
        self.waiting: list[BlendLayer] = []  # layers whose columns wait for the last pass
        asks = not self.rounded and non_prefix.repair.asks(segments, exact)
        if asks and everything:
            self._choose(torch.ones(length, dtype=torch.bool))
            self.estimated_kl = 0.0 if non_prefix.repair.promises else None
        elif asks and non_prefix.shows:
            behind = length - segments[-1].stop
            seen = None if windows is None else self._first_seen
            self.asked = AttentionScores(length, behind, len(non_prefix.decoder), seen)
            self._choose(_live(segments, length) if self.gauge is None else self._fresh)
        elif not checks or self.gauge is not None:
            self._choose(self._fresh)

    @property
    def repair(self) -> Repair:
        """Its own rules."""
        return self._non_prefix.repair

    @property
    def whole(self) -> bool:
        """Whether every row goes through the layers from here on: nothing is reused there, nothing cut."""
        return len(self._rows) == self.length - self.exact

    # ---------------------------------------------------------------- the layers' side

    def columns(self) -> torch.Tensor:
        """Which columns the pass computes, int64 [rows]."""
        return self._rows + self.exact

    @loads
    def load(self, layer: int, storage: torch.Tensor, low: int = 0) -> None:
        """Puts the reused stretches of a layer into `storage` [2, rows, heads, capacity, head_dim], whose
        first column is the prompt's `low`.
        """
        began = time.perf_counter()
        segments, form = self._segments, self._form
        if self._windows is not None and (part := self._windows.of(layer)) is not None:
            for segment in segments:  # nobody sees what nothing is put into; it has to be numbers
                storage[..., segment.start - low : segment.stop - low, :] = 0
            segments, form = part.within(segments), part.form
        for segment in segments:
            at = segment.start - low
            for piece in segment.pieces:
                place(self._non_prefix.rope, form, layer, piece, segment.shift, storage, at)
                at += piece.count
        self._clock.load_s += time.perf_counter() - began

    def _first_seen(self, layer: int, columns: torch.Tensor) -> torch.Tensor:
        part = None if self._windows is None else self._windows.of(layer)
        return torch.zeros_like(columns) if part is None else part.first_seen(columns)

    def check(self, layer: int, storage: torch.Tensor) -> None:
        """K and V of a layer, storage [arrays, 1, heads, columns, head_dim], are there of all that may be
        chosen: chooses the rows that go on into it.
        """
        low = min(segment.start for segment in self._segments)
        high = max(segment.stop for segment in self._segments)
        stored = torch.empty_like(storage[:, :1, :, low:high])
        self.load(layer, stored, low)
        columns = torch.nonzero(self._scanned & ~self._fresh).squeeze(1)
        fresh = storage[:, 0, :, low : low + stored.shape[3]]
        square, norm = compared(stored[:, 0], fresh, (columns - low).to(storage.device))
        size = norm.mean(dim=1, keepdim=True).clamp_min(1e-30)
        deviation = torch.zeros(self.length)
        deviation[columns] = torch.nan_to_num((square / size).sum(dim=0), nan=torch.inf).cpu()
        self._choose(self._non_prefix.repair.worst(deviation, self._fresh, self._scanned))

    def _choose(self, fresh: torch.Tensor, done: int = 0) -> None:
        """done: columns from the pass's first on that are as they have to be."""
        rows = torch.nonzero(fresh[self.exact :]).squeeze(1)
        self.recomputed = len(rows) - (self.length - self.exact - self.found)
        self._rows, self.chosen, self._mask = rows[rows >= done], True, None

    def ask(self, run: Callable[[], Any]) -> Any:
        """run: the pass of live rows over what is stored; what it gives where it goes to its end. The one
        that follows counts."""
        outputs = None
        with contextlib.suppress(Seen):
            outputs = run()
        asked, self.asked, self.stored = self.asked, None, False
        repair, segments = self.repair, self._segments
        if asked is None or (attention := asked.of()) is None:  # not ours, or a compiled graph: tells nothing
            self._rows = torch.nonzero(self._scanned[self.exact :]).squeeze(1)
            self.chosen, self._mask = not repair.checks, None
            return outputs
        self.scored, computed = True, repair.attended(attention, self._fresh, self._may)
        if self.gauge is not None:
            self._choose(computed, self._front)
            return outputs
        told = computed if self._windows is None else computed & self._windows.stored(segments)
        self.drift = Drift(self._non_prefix.rope, segments, told, asked.values)
        self._joined = asked.stop
        # What stands before all that is reused is as it must be, as far as the first pass went.
        self._choose(computed, segments[0].start - self.exact)
        return outputs

    def few_rows(self, rounded: bool) -> contextlib.AbstractContextManager[None]:
        """Within it, linear layers of the rows that are no prefix are not torch's. rounded: but in bf16."""
        return few_rows(self._non_prefix.decoder, self._usual, rounded)

    def _usual(self) -> int | None:
        """How many rows, the first, have torch's bits: what others find as a prefix. None: all."""
        if self._rest is not None:
            return max(0, self._rest.start - self.exact)
        if self.whole or not (self.stored or self.scored):
            return None
        return max(0, self._exact_until - self.exact) if self.stored else 0

    @property
    def rounds(self) -> bool:
        """Whether all that is reused can be computed for half of what it costs to compute all."""
        return rounds(self._non_prefix.decoder)

    def more(self, *, rounded: bool) -> None:
        """Another pass follows, that computes all: what the first pass left, rounded; or as if nothing were
        reused inside."""
        self._choose(torch.ones(self.length, dtype=torch.bool), self._front if rounded else 0)
        self.last = self.whole

    def end(self) -> None:
        """The pass that ended was the last: its columns are the prompt's."""
        self.last = True
        waiting, self.waiting = self.waiting, []
        for layer in waiting:
            if layer.waits:
                layer.commit(self)

    # ---------------------------------------------------------------- the model's side

    def __enter__(self) -> Blend:
        thread = threading.get_ident()
        try:
            for index, module in enumerate(self._non_prefix.decoder):
                hook = _Hook(self, index, thread)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            if self._non_prefix.refills:
                last = self._non_prefix.decoder[-1]
                self._hooks.append(last.register_forward_hook(functools.partial(self._refill, thread)))
        except BaseException:  # an interrupt: what is on would cut the rows of this thread's next call
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def cut_inputs(
        self, index: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A hook before each decoder layer. Raises Seen when all that the pass was for is there."""
        if self.looking:
            return None
        if self.asked is not None and index == self.asked.stop and self.gauge is None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._waiting = hidden[:, : self._segments[0].start - self.exact].clone()
            raise Seen
        if index == self._joined:
            args, kwargs = self._join(args, kwargs)
        before = self._rows
        if index == self.cut and not self.chosen:
            self._look(module, *self._cut(args, kwargs, before, before))
        if self.whole:
            return None
        if index == len(self._non_prefix.decoder) - 1 and self.asked is None and not self.stored:
            # The next token is told from the last row; of the others nobody wants more than K and V.
            self._look(module, *self._cut(args, kwargs, before, self._rows))
            told = 1 if self.gauge is None else self.gauge.rows
            self._rows, self._mask = self._rows[-told:], None
        return self._cut(args, kwargs, before, self._rows)

    def _refill(self, thread: int, _module: torch.nn.Module, _args: Any, outputs: Any) -> Any:
        """Rows of any content before those that were computed, of which the last are asked for."""
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        missing = self.length - self.exact - hidden.shape[1]
        if threading.get_ident() != thread or missing <= 0:
            return None
        hidden = torch.cat([hidden[:, :1].expand(-1, missing, -1), hidden], dim=1)
        return (hidden, *outputs[1:]) if isinstance(outputs, tuple) else hidden

    def _join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of the layer that the first pass ended at, with the rows that wait there."""
        waiting = torch.arange(self._waiting.shape[1])
        self._rows, self._mask = torch.cat([waiting, self._rows]), None
        hidden = torch.cat([self._waiting, args[0] if args else kwargs["hidden_states"]], dim=1)
        return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], before: torch.Tensor, rows: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a layer for these rows only. before: those that came out of the layer before."""
        total = self.length - self.exact
        if len(rows) == total:
            return args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == total:
            hidden = hidden[:, rows.to(hidden.device)]
        elif len(before) != len(rows):
            hidden = hidden[:, torch.searchsorted(before, rows).to(hidden.device)]
        rows, kwargs = rows.to(hidden.device), dict(kwargs)
        if args:
            args = (hidden, *args[1:])
        else:
            kwargs["hidden_states"] = hidden
        kwargs["attention_mask"] = self._masked(kwargs.get("attention_mask"), hidden, rows)
        for name in PER_TOKEN:
            if isinstance(kwargs.get(name), torch.Tensor) and kwargs[name].shape[-1] == total:
                kwargs[name] = kwargs[name][..., rows]
        places = kwargs.get("position_embeddings")
        if isinstance(places, tuple):
            kwargs["position_embeddings"] = tuple(t[..., rows, :] for t in places)
        elif isinstance(places, torch.Tensor) and places.ndim > 1 and places.shape[-2] == total:
            kwargs["position_embeddings"] = places[..., rows, :]  # Llama 4: complex numbers
        return args, kwargs

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Lets rows into a layer up to where it hands K and V to its cache; what follows is not computed."""
        self.looking = True
        try:
            module(*args, **kwargs)
        except Seen:
            return
        finally:
            self.looking = False
        raise Refused(f"{type(module).__name__} hands no K and V to its cache")

    def _masked(self, mask: Any, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(mask, torch.Tensor) and mask.ndim == 4:
            return mask[:, :, rows]
        if mask is not None:
            raise InvalidArgument(f"a decoder layer is given a mask of type {type(mask).__name__}")
        if self._mask is None and self._non_prefix.shows:
            self._mask = at(rows + self.exact, self.length, hidden.dtype)
        elif self._mask is None:  # the model relied on all rows being there: now each needs its own
            columns = torch.arange(self.length, device=hidden.device)
            hidden_columns = columns[None] > (rows + self.exact)[:, None]
            self._mask = torch.zeros(hidden_columns.shape, dtype=hidden.dtype, device=hidden.device)
            self._mask.masked_fill_(hidden_columns, torch.finfo(hidden.dtype).min)
            self._mask = self._mask[None, None]
        return self._mask


def _live(segments: Sequence[Segment], length: int) -> torch.Tensor:
    """Of a prompt's columns those that are not stored: bool [length]."""
    live = torch.ones(length, dtype=torch.bool)
    for segment in segments:
        live[segment.start : segment.stop] = False
    return live


class _Hook:
    """Cuts the inputs of one layer, in the thread that runs the pass."""

    def __init__(self, blend: Blend, index: int, thread: int) -> None:
        self._blend, self._index, self._thread = blend, index, thread

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch reads a hook and whether it takes kwargs apart: while it is put on or taken off, another
        # thread calls it without.
        if kwargs is None or threading.get_ident() != self._thread:
            return None  # another request on the same model
        return self._blend.cut_inputs(self._index, module, args, kwargs)
