"""Which layers a request's cache is made of: dense, in place, paged, on a device, or still for recording.

Owns that choice and the counting of what was asked for and is not had. Never loads a token: layers do, when
the model first asks them. Invariant: all layers of a cache are of one kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.registered import count_fallback
from kvclient.hf.cache.compressed import CompressedLayer
from kvclient.hf.cache.device import DeviceLayer, Positions
from kvclient.hf.cache.hybrid import HybridLayer
from kvclient.hf.cache.in_place import IN_PLACE_DEVICES, InPlaceLayer
from kvclient.hf.cache.indexed import IndexedLayer, number_of
from kvclient.hf.cache.layer import Memory, Shape, StoreLayer, recycled
from kvclient.hf.cache.page_pool import PageTable
from kvclient.hf.cache.paged import PagedDeviceLayer, PagedLayer, leaders
from kvclient.hf.cache.staging import Staged
from kvclient.hf.cache.static import StaticDeviceLayer, StaticLayer, Steps
from kvclient.hf.call import Prompt, Report
from kvclient.hf.connector.load import PrefixMatch, PrefixSource
from kvclient.hf.request.options import Options
from kvclient.hf.request.served_model import ServedModel
from kvclient.hf.reuse.blend import Blend
from kvclient.hf.reuse.blend_layer import BlendLayer

SPARE_TOKENS = 1024  # room for new tokens taken at once; a longer generation grows its memory


class CacheBuilder:
    """Of one request. `staged`: blocks on their way to a GPU; `steps`: of a decode loop to be recorded."""

    def __init__(
        self, options: Options, served: ServedModel, prompt: Prompt, found: Sequence[PrefixMatch],
        prefix: PrefixSource | None, blend: Blend | None, report: Report,
    ) -> None:  # fmt: skip
        self._left = functools.partial(_left, report)
        self._options, self._served, self._prompt, self._found = options, served, prompt, found
        self._prefix, self._blend = prefix, blend
        self._pads = prompt.pads
        self.staged: Staged | None = None
        self.steps: Steps | None = None

    def layers(
        self, config: Any, device: torch.device, written: Callable[..., None] | None, memory: Memory
    ) -> list[StoreLayer]:
        """The layers of a cache for this call, filled with what was found."""
        length = self._prompt.length
        wanted = config.max_length if isinstance(config.max_length, int) else length + SPARE_TOKENS
        static = self._static(config)
        room = min(wanted - length, SPARE_TOKENS) if self._options.room is None else self._options.room
        capacity = max(length, wanted if static else length + room)
        in_place = self._in_place(device)
        recorded = static and not (in_place and device.type != DeviceLayer.device_type)
        paged = in_place and self._options.pool is not None and not recorded
        if recorded and self._options.pool is not None:
            self._left("paged")  # a captured graph has a tail that never moves
        if recorded:
            self.steps = Steps(self._pads, capacity, device)
        if in_place and self._prefix is not None:
            capacity -= self._whole  # a layer then holds what is computed, and a part of a block
        if self._blend is not None:
            make: Callable[..., StoreLayer] = functools.partial(BlendLayer, self._blend)
        elif in_place:
            make = self._made_in_place(device, paged)
        elif self.steps is not None:
            make = functools.partial(StaticLayer, steps=self.steps)
        else:
            make = StoreLayer
        forms = [self._served.form, *(group.form for group in self._served.groups)]
        layers: list[StoreLayer] = []
        for form in (form for form in forms if not form.holds_marks):
            size = (self._prompt.rows, form.heads, form.head_dim, form.dtype, device, capacity, form.key_dim)
            shape = Shape(*size, most_tokens=self._served.most_tokens)
            spare = [None] * form.layers if paged else recycled(memory, shape, form.layers)
            for index, storage in zip(form.of or range(form.layers), spare, strict=True):
                made = (self._kind(index) or make)(index, shape, self._prefix, written, storage)
                layers.append(made.of_states(self._count(index)) if isinstance(made, HybridLayer) else made)
                if isinstance(made, CompressedLayer):
                    made.rate = dict(self._served.rates)[index]
        return sorted(layers, key=lambda layer: layer.index)

    def _count(self, layer: int) -> int:
        """How many states a layer keeps of a kind."""
        states = self._served.states
        return 0 if states is None else 1 + max(s.index for s in states.states if s.layer == layer)

    def _kind(self, layer: int) -> type[StoreLayer] | None:
        """Of a layer that keeps something besides, or is what is kept besides; None: as all are."""
        states, layers = self._served.states, self._served.layers
        if states is not None and layer in {state.layer for state in states.states}:
            return HybridLayer
        if layer >= layers:
            return StoreLayer
        if not self._served.groups:
            return None
        if layer in dict(self._served.rates):
            return CompressedLayer
        parts = {number for group in self._served.groups for number in group.form.of or ()}
        return IndexedLayer if number_of(layer, layers) in parts else None

    def _made_in_place(self, device: torch.device, paged: bool) -> Callable[..., StoreLayer]:
        forget_pending()
        pool, prompt = self._options.pool, self._prompt
        options = {"pads": self._pads, "left": self._left, "reader": self._options.in_place}
        if self._prefix is not None and device.type != DeviceLayer.device_type:
            options["whole"] = self._whole
        if paged:
            assert pool is not None
            first = leaders([group.rows for group in prompt.groups], prompt.rows)
            options["table"] = PageTable(pool, self._pads, first, prompt.length)
        if device.type != DeviceLayer.device_type:
            return functools.partial(PagedLayer if paged else InPlaceLayer, **options)
        if self._prefix is not None:
            patient = any(prefix.pending for prefix in self._found)
            self.staged = Staged(self._prefix, self._served.layers, device, patient)
        make: Callable[..., DeviceLayer] = PagedDeviceLayer if paged else DeviceLayer
        if self.steps is not None:
            make = functools.partial(StaticDeviceLayer, steps=self.steps)
        return functools.partial(make, **options, staged=self.staged, positions=Positions())

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
        if any(prefix.part is not None for prefix in self._found) and not self._copies_part(device):
            self._left("part")  # its tokens go into a block together with what follows
            return False
        return True

    def _copies_part(self, device: torch.device) -> bool:
        """Whether a layer can begin with a copy of a part of a block, behind whole ones where they lie."""
        plain = all(prefix.part_form.codec is None for prefix in self._found)
        alone = self._prompt.rows == 1 and not any(self._pads)
        return plain and alone and self._options.pool is None and device.type == "cpu"

    @property
    def _whole(self) -> int:
        """Columns that are read in whole blocks."""
        assert self._prefix is not None
        parted = next((prefix for prefix in self._found if prefix.part is not None), None)
        return self._prefix.columns if parted is None else parted.starts[len(parted.views)]


def _left(report: Report, reason: str) -> None:
    """Counts what is not read in place, and has the call say so, not what becomes of its cache later."""
    count_fallback(reason)
    if not report.total_s:
        report.dense = reason
