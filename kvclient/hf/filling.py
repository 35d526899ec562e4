"""Which layers a request's cache is made of: dense, in place, paged, on a device, or still for recording.

Owns that choice and the counting of what was asked for and is not had. Never loads a token: layers do, when
the model first asks them. Invariant: all layers of a cache are of one kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from kvclient.blocks.chunker import Chunker
from kvclient.checks import check_bounds, whole_seconds
from kvclient.errors import InvalidArgument
from kvclient.hf.attention.adopt import IN_PLACE_DEVICES, Reader
from kvclient.hf.attention.device_layer import DeviceLayer, Positions
from kvclient.hf.attention.layer import InPlaceLayer, forget_pending
from kvclient.hf.attention.paged import PagedDeviceLayer, PagedLayer, leaders
from kvclient.hf.attention.pages import PagePool, PageTable
from kvclient.hf.attention.registered import count_fallback
from kvclient.hf.attention.static import StaticLayer, Steps
from kvclient.hf.attention.static_device import StaticDeviceLayer
from kvclient.hf.blend import Blend, BlendLayer
from kvclient.hf.cache import Shape, StoreLayer, recycled
from kvclient.hf.form import Form
from kvclient.hf.memory import Memory
from kvclient.hf.prefix import Found, Prefix
from kvclient.hf.prompt import Prompt
from kvclient.hf.report import Report
from kvclient.hf.staging import Staged

MAX_PRIORITY, MAX_FOLLOW_S = 100, 3600
SPARE_TOKENS = 1024  # room for new tokens taken at once; a longer generation grows its memory


@dataclass(frozen=True)
class Options:
    chunker: Chunker  # the rule that prompts are cut into blocks by
    priority: int
    ttl_s: float | None
    follow: bool
    follow_timeout_s: float
    publish_generated: bool
    chunked_reads: bool  # this transformers can prefill in chunks behind a filled cache
    in_place: Reader | None = None  # the model's attention reads blocks where they lie
    static: bool = False  # decoding does not move the tail; its step is recorded where it can be
    pool: PagePool | None = None  # …and what it computes lies in pages of this one
    publish_tokens: int | None = None  # of a prompt, at most; None: all, and generated text
    search: bool = True  # behind the prefix too, where the model allows it

    def __post_init__(self) -> None:
        check_bounds("priority", self.priority, 0, MAX_PRIORITY)
        whole_seconds(self.ttl_s)
        if not isinstance(self.follow_timeout_s, Real) or not 0 < self.follow_timeout_s <= MAX_FOLLOW_S:
            limits = f"it must be above 0 and at most {MAX_FOLLOW_S}"
            raise InvalidArgument(f"follow_timeout_s={self.follow_timeout_s!r}; {limits}")


class Filling:
    """Of one request. `staged`: blocks on their way to a GPU; `steps`: of a decode loop to be recorded."""

    def __init__(
        self, options: Options, form: Form, prompt: Prompt, found: Sequence[Found], prefix: Prefix | None,
        blend: Blend | None, report: Report,
    ) -> None:  # fmt: skip
        self._left = functools.partial(_left, report)
        self._options, self._form, self._prompt, self._found = options, form, prompt, found
        self._prefix, self._blend = prefix, blend
        self._pads = [pad for _, pad in sorted((row, g.pad) for g in prompt.groups for row in g.rows)]
        self.staged: Staged | None = None
        self.steps: Steps | None = None

    def layers(
        self, config: Any, device: torch.device, written: Callable[..., None] | None, memory: Memory
    ) -> list[StoreLayer]:
        length, form = self._prompt.length, self._form
        wanted = config.max_length if isinstance(config.max_length, int) else length + SPARE_TOKENS
        static = self._static(config)
        capacity = max(length, wanted if static else min(wanted, length + SPARE_TOKENS))
        in_place = self._in_place(device)
        recorded = static and not (in_place and device.type != DeviceLayer.device_type)
        paged = in_place and self._options.pool is not None and not recorded
        if recorded and self._options.pool is not None:
            self._left("paged")  # a captured graph has a tail that never moves
        if recorded:
            self.steps = Steps(self._pads, capacity, device)
        if in_place and self._prefix is not None:
            capacity -= self._prefix.columns  # a layer then holds what is computed, and no more
        shape = Shape(self._prompt.rows, form.heads, form.head_dim, form.dtype, device, capacity)
        if self._blend is not None:
            make: Callable[..., StoreLayer] = functools.partial(BlendLayer, self._blend)
        elif in_place:
            make = self._made_in_place(device, paged)
        elif self.steps is not None:
            make = functools.partial(StaticLayer, steps=self.steps)
        else:
            make = StoreLayer
        given = [None] * form.layers if paged else recycled(memory, shape, form.layers)
        return [make(index, shape, self._prefix, written, own) for index, own in enumerate(given)]

    def _made_in_place(self, device: torch.device, paged: bool) -> Callable[..., StoreLayer]:
        forget_pending()
        pool, prompt = self._options.pool, self._prompt
        given = {"pads": self._pads, "left": self._left, "reader": self._options.in_place}
        if paged:
            assert pool is not None
            first = leaders([group.rows for group in prompt.groups], prompt.rows)
            given["table"] = PageTable(pool, self._pads, first, prompt.length)
        if device.type != DeviceLayer.device_type:
            return functools.partial(PagedLayer if paged else InPlaceLayer, **given)
        if self._prefix is not None:
            patient = any(one.pending for one in self._found)
            self.staged = Staged(self._prefix, self._form.layers, device, patient)
        make: Callable[..., DeviceLayer] = PagedDeviceLayer if paged else DeviceLayer
        if self.steps is not None:
            make = functools.partial(StaticDeviceLayer, steps=self.steps)
        return functools.partial(make, **given, staged=self.staged, positions=Positions())

    def _static(self, config: Any) -> bool:
        if not self._options.static:
            return False
        if (config.num_beams or 1) > 1 or self._blend is not None:
            self._left("graph_beams" if self._blend is None else "graph_inside")
            return False
        return True

    def _in_place(self, device: torch.device) -> bool:
        if not self._options.in_place or device.type not in IN_PLACE_DEVICES:
            return False
        if self._blend is not None:
            self._left("inside")  # fresh tokens stand among reused ones
            return False
        if any(one.part is not None for one in self._found):
            self._left("part")  # its tokens go into a block together with what follows
            return False
        return True


def _left(report: Report, reason: str) -> None:
    """Counts what is not read in place, and has the call say so, not what becomes of its cache later."""
    count_fallback(reason)
    if not report.total_s:
        report.dense = reason
