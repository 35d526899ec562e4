"""The streamed layers of a model on a device: their slots, and whose weights point into which.

Owns the hooks around those layers. Never changes a module's forward. Invariant: a streamed weight is a tensor
without memory (torch's "meta") whenever its layer is not being asked for, so that nobody reads what another
layer has put there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.hf.streaming.device.layout import Attribute, attributes, put
from kvclient.hf.streaming.device.mover import DeviceMover
from kvclient.hf.streaming.device.runtime import Runtime
from kvclient.hf.streaming.files.index import Part
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.residency import Plan, StreamingConfig
from kvclient.hf.streaming.scheduler import Scheduler
from kvclient.hf.streaming.slots import Slot


@dataclass(frozen=True)
class Moving:
    """A layer whose parts come and go, one behind the other in the host's image from `offset` on."""

    number: int
    module: torch.nn.Module
    parts: tuple[Part, ...]
    offset: int

    @property
    def length(self) -> int:
        """Bytes of its parts."""
        return sum(part.length for part in self.parts)

    def stretches(self, memory: torch.Tensor, at: int = 0) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part with its bytes; memory: uint8 [bytes], holds them from `at` on."""
        for part in self.parts:
            yield part, memory[at : at + part.length]
            at += part.length

    def attributes(self, memory: torch.Tensor | None, at: int = 0) -> list[tuple[Attribute, Any]]:
        """Of all parts, as layout.attributes(); memory: uint8 [bytes], or None."""
        if memory is None:
            return [found for part in self.parts for found in attributes(self.module, part, None)]
        stretches = self.stretches(memory, at)
        return [found for part, stretch in stretches for found in attributes(self.module, part, stretch)]


class DeviceStreams:
    """moving: by number. mover: None, nothing is streamed."""

    def __init__(
        self, prefix: str, moving: dict[int, Moving], plan: Plan, config: StreamingConfig,
        mover: DeviceMover | None, runtime: Runtime,
    ) -> None:  # fmt: skip
        self.plan, self._prefix, self._moving = plan, prefix, moving
        self._mover, self.runtime = mover, runtime
        self.digests: list[Any] | None = None  # of the streamed weights, once somebody has computed them
        self.embedding = None  # none that is read row by row
        self.trace = None
        self.scheduler: Scheduler | None = None
        self.link: float | None = None  # bytes a second, measured before anything was computed
        self._users: dict[int, int] = {}
        self._lock, self._holding = threading.Lock(), threading.local()
        self._away = {number: layer.attributes(None) for number, layer in moving.items()}
        self._there: dict[tuple[int, int], list[tuple[Attribute, Any]]] = {}  # by layer and slot
        for values in self._away.values():
            put(values)
        if mover is None:
            return
        pieces = {n: (Piece(layer.offset, layer.length, None),) for n, layer in moving.items()}
        longest = max(moving.values(), key=lambda layer: layer.length)
        self.link = mover.rate(longest.number, pieces[longest.number], mover.memory(longest.length))
        self.scheduler = Scheduler(mover, pieces, config.n_staging_slots, config.ahead)
        for number, layer in moving.items():
            layer.module.register_forward_pre_hook(self._before(number))
            layer.module.register_forward_hook(self._after(number), always_call=True)
        self._began = time.monotonic()

    def close(self) -> None:
        """Ends the copies; the model cannot be called any more."""
        if self.scheduler is not None:
            self.scheduler.close()
            self.runtime.settle()

    def moving(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Of each weight that has memory only while its layer computes, by its name: module and attribute."""
        found = {}
        for number, layer in self._moving.items():
            for stored in (stored for part in layer.parts for stored in part.tensors):
                owner, _, name = stored.name.rpartition(".")
                found[f"{self._prefix}.{number}.{stored.name}"] = layer.module.get_submodule(owner), name
        return found

    def digested_tables(self) -> Iterator[tuple[str, str, list[int], bytes]]:
        """Of the vocabulary nothing is streamed."""
        return iter(())

    def filled_layers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each streamed layer in turn, with its name and its weights, until the next is asked for."""
        for number, layer in self._moving.items():
            self._before(number)(layer.module, ())
            try:
                yield f"{self._prefix}.{number}", layer.module
            finally:
                self._after(number)(layer.module, (), None)

    def stats(self) -> dict[str, Any]:
        """Waits for the device. Seconds are the device's; link_share: of the time since the model was loaded
        in which bytes came over the link.
        """
        found = {"bytes_held": self.plan.bytes, "bytes_per_pass": self.plan.moved}
        if self.scheduler is None or self._mover is None:
            return found
        self.runtime.settle()
        spans = self._mover.spans
        copied = spans.by_layer("copy")
        since, busy = time.monotonic() - self._began, sum(copied.values())
        return {
            **found, "bytes": self.scheduler.bytes, "loads": self.scheduler.loads,
            "hits": self.scheduler.hits, "retries": self.scheduler.retries, "filling_s": busy,
            "waited_s": spans.by_layer("wait"), "computed_s": spans.by_layer("compute"), "elapsed_s": since,
            "link_share": busy / since if since else 0.0, "link_bytes_per_s": self.link,
        }  # fmt: skip

    def expected_s(self) -> float | None:
        """Seconds of a pass of one row at the link's rate; None: nothing is streamed."""
        return self.plan.moved / self.link if self.link else None

    # ---------------------------------------------------------------- around a layer

    def _before(self, number: int) -> Callable[..., None]:
        def before(layer: torch.nn.Module, _args: tuple[Any, ...]) -> None:
            assert self.scheduler is not None
            self._give_back_what_was_left()
            with contextlib.ExitStack() as stack:
                slot = stack.enter_context(self.scheduler.holding(number))
                with self._lock:
                    if not self._users.get(number):
                        put(self._values(number, slot))
                    self._users[number] = self._users.get(number, 0) + 1
                self._holds(number).append(stack.pop_all())

        return before

    def _after(self, number: int) -> Callable[..., None]:
        """Also after an exception in the layer."""

        def after(_layer: torch.nn.Module, _args: Any, _out: Any) -> None:
            if not (stacks := self._holds(number)):
                return  # the layer was never given its weights
            held = stacks.pop()
            with self._lock:
                self._users[number] -= 1
                if not self._users[number]:
                    put(self._away[number])
            held.close()

        return after

    def _values(self, number: int, slot: Slot) -> list[tuple[Attribute, Any]]:
        """The layer's weights in this slot, made once."""
        memory: Any = slot.memory
        key = number, slot.number
        if key not in self._there:
            self._there[key] = self._moving[number].attributes(memory)
        return self._there[key]

    def _holds(self, number: int) -> list[contextlib.ExitStack]:
        """Of the calling thread: what is given back behind the layer."""
        stacks: dict[int, list[Any]] = self._holding.__dict__.setdefault("stacks", {})
        return stacks.setdefault(number, [])

    def _give_back_what_was_left(self) -> None:
        """torch calls no hook behind a layer that Ctrl-C ends: what this thread still holds as it enters the
        next one is of such a layer.
        """
        for number, holds in self._holding.__dict__.get("stacks", {}).items():
            while holds:
                self._after(number)(self._moving[number].module, (), None)
