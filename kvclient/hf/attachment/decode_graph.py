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
from collections.abc import Iterator
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attachment.running import PLACE
from kvclient.hf.cache.device import DeviceLayer
from kvclient.hf.model.around import foreign_forward
from kvclient.hf.model.structure import widest_window

BEFORE = "_kvclient_before"  # an attribute of our forward: the one it took the place of, or None


def check(model: torch.nn.Module) -> None:
    """Raises InvalidArgument, with the reason, if this model's steps cannot be prepared."""
    if window := widest_window(model.config.get_text_config(decoder=True)):
        raise InvalidArgument(
            f"{type(model).__name__} has layers that see {window} tokens: no step is recorded"
        )
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
    forward_of_class, before = type(model).forward, model.__dict__.get("forward")
    whose = weakref.ref(model)  # a deep copy has this function too, and weights of its own

    @functools.wraps(forward_of_class)
    def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = model.__dict__.get(PLACE)
        request = attachment._local.request if attachment is not None else None
        step = request.step if request is not None else None
        if step is not None and step.takes(args, kwargs):
            return step(kwargs["input_ids"])
        if before is not None and whose() is model:
            return before(*args, **kwargs)
        return forward_of_class(model, *args, **kwargs)

    setattr(forward, BEFORE, before)
    return types.MethodType(forward, model)


@contextlib.contextmanager
def decoding(attachment: Any, model: torch.nn.Module) -> Iterator[None]:
    """Attachment.decode_graph()."""
    # In place on a CPU it is the model's own forward, over a tail that does not move.
    recorded = not attachment._model_state.options.in_place or model.device.type == DeviceLayer.device_type
    if recorded:
        check(model)
    with attachment._lock:
        attachment.decoding += 1
        if recorded and not hasattr(model.__dict__.get("forward"), BEFORE):
            model.__dict__["forward"] = forward_of(model)
    try:
        with attachment.set_here(static=True):
            yield
    finally:
        with attachment._lock:
            attachment.decoding -= 1
            if not attachment.decoding and hasattr(model.__dict__.get("forward"), BEFORE):
                ours = model.__dict__.pop("forward")
                if (previous := getattr(ours, BEFORE)) is not None:
                    model.__dict__["forward"] = previous
