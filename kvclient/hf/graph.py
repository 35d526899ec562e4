"""A decode loop whose step is recorded once and replayed: on a GPU a CUDA graph, no Python between kernels.

Owns the step of one call of generate(): static inputs, the recording, and the model's `forward` as long as
some thread wants it. Never changes what generate() chooses or how. Invariant: the step computes what the
model's own forward computes for the same token; a call that cannot be such a step goes to the model itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attention.device_layer import DeviceLayer
from kvclient.hf.attention.layer import stepping
from kvclient.hf.attention.static import Steps
from kvclient.hf.hooks import PLACE
from kvclient.hf.watch import foreign_forward

BEFORE = "_kvclient_before"  # an attribute of our forward: the one it took the place of, or None
WARM_UPS = 2  # runs before a capture, in which libraries set themselves up


class Step:
    """One token a row through the model, with the same tensors every time."""

    def __init__(self, model: torch.nn.Module, cache: Any, steps: Steps, rows: int) -> None:
        self._model, self._cache, self._steps = model, cache, steps
        self._ids = torch.zeros((rows, 1), dtype=torch.int64, device=steps.column.device)
        self._places = torch.zeros_like(self._ids)
        self._replay: Callable[[], None] | None = None
        self._out: Any = None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        ids = kwargs.get("input_ids")
        wanted = kwargs.get("output_attentions") or kwargs.get("output_hidden_states")
        return (
            not args
            and not wanted
            and ids is not None
            and ids.shape == self._ids.shape
            and kwargs.get("past_key_values") is self._cache
            and not self._steps.over
            and self._steps.length < self._steps.capacity
            and not torch.is_grad_enabled()
        )

    def __call__(self, ids: torch.Tensor) -> Any:
        steps = self._steps
        self._ids.copy_(ids)
        steps.column.fill_(steps.length)
        torch.sub(steps.column, steps.pads, out=self._places)
        if self._replay is None:
            steps.start(steps.length)
            self._replay, self._out = recorder(self._ids.device)(self._run)
        self._replay()
        steps.length += 1
        return type(self._out)(logits=self._out.logits.clone(), past_key_values=self._cache)

    def _run(self) -> Any:
        """May run any number of times for one token: it writes the same to the same places."""
        with stepping():
            return type(self._model).forward(
                self._model, input_ids=self._ids, position_ids=self._places, past_key_values=self._cache,
                use_cache=True, return_dict=True,
            )  # fmt: skip


def recorder(device: torch.device) -> Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]:
    """What makes a replay, and the output it fills, of a function."""
    return record_cuda if device.type == "cuda" else record_nothing


def record_cuda(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def record_nothing(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Where there are no graphs: runs again, into the same output."""
    out = run()

    def replay() -> None:
        out.logits.copy_(run().logits)

    return replay, out


def check(model: torch.nn.Module) -> None:
    """Raises InvalidArgument, with the reason, if this model's steps cannot be prepared."""
    if foreign_forward(model):
        raise InvalidArgument(f"this {type(model).__name__} was given a forward of its own")
    if attention.installed(model) is None:
        raise InvalidArgument(
            "decode_graph() needs attention that knows lengths on the device: "
            "kvclient.hf.attention.install(model) before attach()"
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise InvalidArgument(f"{type(model).__name__} takes no position_ids: a step could not be replayed")


def forward_of(model: torch.nn.Module) -> Any:
    """The model's forward, by way of the calling thread's Step, if it has one; else what stood there before,
    as torch.compile's or accelerate's.
    """
    own, before = type(model).forward, model.__dict__.get("forward")
    whose = weakref.ref(model)  # a deep copy has this function too, and weights of its own

    @functools.wraps(own)
    def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = model.__dict__.get(PLACE)
        request = getattr(attachment._local, "request", None) if attachment is not None else None
        step = request.step if request is not None else None
        if step is not None and step.takes(args, kwargs):
            return step(kwargs["input_ids"])
        if before is not None and whose() is model:
            return before(*args, **kwargs)
        return own(model, *args, **kwargs)

    setattr(forward, BEFORE, before)
    return types.MethodType(forward, model)


@contextlib.contextmanager
def decoding(attachment: Any, model: torch.nn.Module) -> Iterator[None]:
    """Attachment.decode_graph()."""
    local = attachment._local
    # In place on a CPU it is the model's own forward, over a tail that does not move.
    recorded = not attachment._known.options.in_place or model.device.type == DeviceLayer.device_type
    if recorded:
        check(model)
    with attachment._lock:
        attachment.decoding += 1
        if recorded and not hasattr(model.__dict__.get("forward"), BEFORE):
            model.__dict__["forward"] = forward_of(model)
    before, local.static = getattr(local, "static", False), True
    try:
        yield
    finally:
        local.static = before
        with attachment._lock:
            attachment.decoding -= 1
            if not attachment.decoding and hasattr(model.__dict__.get("forward"), BEFORE):
                ours = model.__dict__.pop("forward")
                if (own := getattr(ours, BEFORE)) is not None:
                    model.__dict__["forward"] = own
