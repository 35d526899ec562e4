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
from dataclasses import replace
from typing import Any

import torch

from kvclient.hf.streaming.device.host import HostLayers
from kvclient.hf.streaming.device.layout import Attribute, Moving, put
from kvclient.hf.streaming.device.mover import DeviceMover
from kvclient.hf.streaming.device.runtime import Runtime
from kvclient.hf.streaming.device.shares import MOST_ROWS, Shares
from kvclient.hf.streaming.device.spans import Spans
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.placement.choice import Placement
from kvclient.hf.streaming.residency import Plan, StreamingConfig
from kvclient.hf.streaming.scheduler import Scheduler
from kvclient.hf.streaming.slots import Slot
from kvclient.hf.streaming.trace import Trace
from kvclient.hf.streaming.weights.places import changed, forward_only


class DeviceStreams:
    """moving: by number. mover: None, nothing is streamed."""

    def __init__(
        self, moving: dict[int, Moving], plan: Plan, config: StreamingConfig,
        mover: DeviceMover | None, runtime: Runtime,
    ) -> None:  # fmt: skip
        self.plan, self.layers = plan, moving
        self._moving = [place for layer in moving.values() for place in layer.places()]
        self.mover, self.runtime = mover, runtime
        self.digests: dict[tuple[int, str], Any] = {}  # of streamed weights, once somebody computed them
        self.embedding = None  # none that is read row by row
        self.unpacked = 0  # bytes of the largest packed matrix as numbers, which many rows are multiplied by
        self.scheduler: Scheduler | None = None
        self.link: float | None = None  # bytes a second, measured before anything was computed
        self.shares: Shares | None = None  # what the host computes
        self.placement: Placement | None = None
        self._hosts: HostLayers | None = None
        self._users: dict[int, int] = {}
        self._lock, self._holding = threading.Lock(), threading.local()
        self._away = {number: layer.attributes(None) for number, layer in moving.items()}
        self._there: dict[tuple[int, int], list[tuple[Attribute, Any]]] = {}  # by layer and slot
        for values in self._away.values():
            put(values)
        self.trace = Trace() if config.trace else None
        if mover is None:
            return
        mover.spans = self._new_spans()
        pieces = {n: (Piece(layer.offset, layer.length, None),) for n, layer in moving.items()}
        longest = max(moving.values(), key=lambda layer: layer.length)
        self.link = mover.rate(longest.number, pieces[longest.number], mover.memory(longest.length))
        self.scheduler = Scheduler(mover, pieces, config.n_staging_slots, config.ahead)
        for number, layer in moving.items():
            layer.module.register_forward_pre_hook(self._before(number))
            layer.module.register_forward_hook(self._after(number), always_call=True)
        self._began = time.monotonic()

    def traced(self) -> Trace | None:
        """With all that the device has done; None: nothing is traced. Waits for the device."""
        if self.trace is not None and self.mover is not None:
            self.runtime.settle()
            self.mover.spans.by_layer("copy")  # counts what was passed
        return self.trace

    def _new_spans(self) -> Spans:
        if self.trace is None:
            return Spans()
        passed = self.runtime.current_stream().record_event(self.runtime.event())
        self.runtime.settle()
        return Spans(self.trace, (passed, time.monotonic()))

    def close(self) -> None:
        """Ends the copies; the model cannot be called any more."""
        if self.scheduler is not None:
            self.scheduler.close()
            self.runtime.settle()

    def moving(self) -> list[tuple[torch.nn.Module, str]]:
        """Module and attribute of each weight that has memory only while its layer computes."""
        return self._moving

    def digested_tables(self) -> Iterator[tuple[torch.nn.Module, str, list[int], bytes]]:
        """Of the vocabulary nothing is streamed."""
        return iter(())

    def filled_layers(self) -> Iterator[torch.nn.Module]:
        """Each streamed layer in turn, with its weights, until the next is asked for."""
        for number in self.layers:
            with self.looked_at(number) as layer:
                yield layer

    @contextlib.contextmanager
    def looked_at(self, number: int) -> Iterator[torch.nn.Module]:
        """A layer with its weights, in a slot."""
        layer = self.layers[number].module
        self._before(number)(layer, ())
        try:
            yield layer
        finally:
            self._after(number)(layer, (), None)

    def moved(self) -> dict[int, int]:
        """Bytes of each streamed layer."""
        return {number: layer.length for number, layer in self.layers.items()}

    def fix(self, number: int, names: frozenset[str], image: torch.Tensor) -> None:
        """From here on these of a layer's tensors stay where the device sees the host's image, uint8 [bytes],
        and the others come and go. Nobody computes.
        """
        layer = self.layers[number] = replace(self.layers[number], fixed=names)
        self._there = {key: held for key, held in self._there.items() if key[0] != number}
        self._away[number] = layer.attributes(None)
        put(self._away[number])
        put(layer.fixed_attributes(image))

    def share(self, shares: Shares, hosts: HostLayers) -> None:
        """From here on the host computes what `shares` choose, and what these layers can. Counts anew."""
        assert self.scheduler is not None and self.mover is not None
        self.shares, self._hosts = shares, hosts
        self.placement = Placement(shares, self.moved(), (), self.scheduler)
        self.placement.choice(1)  # so that it is told before anything is computed
        self.runtime.settle()
        self.mover.spans, self._began = self._new_spans(), time.monotonic()
        hosts.trace = self.trace
        self.scheduler.loads = self.scheduler.hits = self.scheduler.retries = self.scheduler.bytes = 0

    def stats(self) -> dict[str, Any]:
        """Waits for the device. Seconds are the device's; link_share: of the time since the model was loaded
        in which bytes came over the link.
        """
        found = {"bytes_held": self.plan.bytes, "bytes_per_pass": self.plan.moved}
        if self.scheduler is None or self.mover is None:
            return found
        self.runtime.settle()
        spans = self.mover.spans
        copied = spans.by_layer("copy")
        since, busy = time.monotonic() - self._began, sum(copied.values())
        return {
            **found, "bytes": self.scheduler.bytes, "loads": self.scheduler.loads,
            "hits": self.scheduler.hits, "retries": self.scheduler.retries, "filling_s": busy,
            "waited_s": spans.by_layer("wait"), "computed_s": spans.by_layer("compute"), "elapsed_s": since,
            "link_share": busy / since if since else 0.0, "link_bytes_per_s": self.link,
            **self._on_host(),
        }  # fmt: skip

    def _on_host(self) -> dict[str, Any]:
        """Of what the host computes: its choice, memory, and seconds by layer."""
        if self.placement is None or self._hosts is None:
            return {}
        held = {"host_bytes": self._hosts.bytes, "host_computed_s": dict(self._hosts.computed_s)}
        return {"placement": {**self.placement.report(), **held}}

    def expected_s(self) -> float | None:
        """Seconds of a pass of one row, at the link's rate or as it was shared; None: nothing is streamed."""
        if self.shares is not None and self.placement is not None:
            on_host = list(self.placement.choice(1).values()).count("host")
            return self.shares.pass_s(self.moved(), 1, on_host)
        return self.plan.moved / self.link if self.link else None

    # ---------------------------------------------------------------- around a layer

    def _before(self, number: int) -> Callable[..., None]:
        def before(_layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
            self._give_back_what_was_left(number)
            with contextlib.ExitStack() as stack:
                if on_host := self._goes_to_host(number, args):
                    assert self._hosts is not None
                    stack.enter_context(self._hosts.computing(number))
                else:
                    self._fill(number, stack)
                self._holds(number).append((stack.pop_all(), on_host))

        return before

    def _goes_to_host(self, number: int, args: tuple[Any, ...]) -> bool:
        """Whether the host computes the layer, which is called with these. Without any it is looked at."""
        if self.placement is None or not args or torch.compiler.is_compiling():
            return False
        rows = min(args[0].shape[:-1].numel(), MOST_ROWS + 1)  # more are all the same
        if found := self.placement.enter(number, rows):
            self.placement.counted()
        return found

    def _fill(self, number: int, stack: contextlib.ExitStack) -> None:
        """The layer has its weights, in a slot, until the stack is closed."""
        assert self.scheduler is not None
        slot = stack.enter_context(self.scheduler.holding(number))
        with self._lock:
            if not self._users.get(number):
                values = self._values(number, slot)
                self._check(number, values)
                put(values)
            self._users[number] = self._users.get(number, 0) + 1
        stack.callback(self._leave, number)

    def _leave(self, number: int) -> None:
        with self._lock:
            self._users[number] -= 1
            if not self._users[number]:
                put(self._away[number])

    def _after(self, number: int) -> Callable[..., Any]:
        """Also after an exception in the layer."""

        def after(_layer: torch.nn.Module, _args: Any, out: Any) -> Any:
            if not (stacks := self._holds(number)):
                return out  # the layer was never given its weights
            held, on_host = stacks.pop()
            held.close()
            return out if on_host else forward_only(out, f"layer {number}")

        return after

    def _values(self, number: int, slot: Slot) -> list[tuple[Attribute, Any]]:
        """The layer's weights in this slot, made once."""
        memory: Any = slot.memory
        key = number, slot.number
        if key not in self._there:
            self._there[key] = self.layers[number].attributes(memory)
        return self._there[key]

    def _check(self, number: int, values: list[tuple[Attribute, Any]]) -> None:
        """Raises InvalidArgument for a weight that somebody has changed, which would be lost."""
        for ((held, name), was), ((into, _), value) in zip(self._away[number], values, strict=True):
            if held is not into or held.get(name) is not was or was.dtype != value.dtype:
                raise changed(f"{name} of layer {number}", held.get(name), value.dtype)

    def _holds(self, number: int) -> list[tuple[contextlib.ExitStack, bool]]:
        """Of the calling thread: what is given back behind the layer, and whether the host computes it."""
        stacks: dict[int, list[Any]] = self._holding.__dict__.setdefault("stacks", {})
        return stacks.setdefault(number, [])

    def _give_back_what_was_left(self, entered: int) -> None:
        """torch calls no hook behind a layer that Ctrl-C ends: what this thread still holds as it enters the
        next one is of such a layer. What it holds of the one it enters may be of a call around this one,
        whose other hooks ask the layer for K and V before it is computed.
        """
        for number, holds in self._holding.__dict__.get("stacks", {}).items():
            while number != entered and holds:
                self._after(number)(self.layers[number].module, (), None)
