"""Which model has the kernels as its attention: install(), uninstall(), and what it had before.

Owns the switching. Never computes: what is switched to is in registered.py. Invariant: what a model had is
kept in the model itself, so that a copy has it too, and one from a file needs no kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from kvclient.errors import InvalidArgument
from kvclient.hf.attention import backends, proof
from kvclient.hf.attention.backends import Backend
from kvclient.hf.attention.registered import PREFIX, backend_named, register

PLACE = "_kvclient_attention"  # where a model keeps what it had before install()
BROUGHT = "_kvclient_attention_brought"  # …and that nobody asked for the kernels but an attachment


class Name(str):
    """Of our attention, in a model's configuration. A process that reads it from a file has the attention of
    before: it need not know ours.
    """

    def __new__(cls, name: str, before: str) -> Name:
        registered = super().__new__(cls, name)
        registered._before = before
        return registered

    def __deepcopy__(self, memo: Any) -> Name:
        return self  # a copy in this process has the kernels

    def __reduce__(self) -> Any:
        return str, (self._before,)


class Before(dict[str, str]):
    """What a model's parts had before install(); nothing in one from a file."""

    def __deepcopy__(self, memo: Any) -> Before:
        return Before(self)

    def __reduce__(self) -> Any:
        return type(None), ()


def install(model: torch.nn.Module, backend: str | None = None) -> str:
    """Gives the model the kernels as its attention, until uninstall(). Returns the name of the backend.

    backend: a name of available_backends(); default: KVCLIENT_BACKEND, or the best that fits. Raises
    InvalidArgument if that cannot run here, or if the model's attention cannot be replaced: a few tokens are
    computed both ways, once for each kind of model, and must come out the same.
    """
    return _install(model, backend, proven=False)


def _install(model: torch.nn.Module, backend: str | None, proven: bool) -> str:
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(f"{type(model).__name__} is no transformers model: give the one inside it")
    if model.__dict__.get(PLACE) is not None:
        raise InvalidArgument("the kernels are installed in this model already; uninstall() first")
    if not type(model)._can_set_attn_implementation():
        raise InvalidArgument(f"{type(model).__name__} calls its own attention and no registered function")
    chosen = backend_of(model, backend)
    before = Before({name: part.config._attn_implementation for name, part in configured(model)})
    model.__dict__[PLACE] = before
    model.__dict__.pop(BROUGHT, None)  # of an attached one that this was, before it went through a file
    try:
        model.set_attn_implementation(register(chosen))
        for name, part in configured(model):
            if (current := part.config._attn_implementation) == register(chosen):
                part.config._attn_implementation_internal = Name(current, before[name])
        if not proven:
            proof.prove(model, lambda: without(model), chosen.name)
    except BaseException:
        uninstall(model)
        raise
    return chosen.name


def backend_of(model: torch.nn.Module, name: str | None = None) -> Backend:
    """The backend that this model has, or that install() would give it."""
    if (chosen := installed(model)) is not None:
        return backends.backend(chosen)
    return backends.choose(model.device, model.dtype, backends.head_dim_of(model), name)


def uninstall(model: torch.nn.Module) -> None:
    """Gives the model back the attention it had; one that it was given since stays. Idempotent."""
    before = model.__dict__.pop(PLACE, None)
    model.__dict__.pop(BROUGHT, None)
    for name, part in configured(model) if before is not None else ():
        if name in before and str(part.config._attn_implementation).startswith(PREFIX):
            part.config._attn_implementation_internal = before[name]


@contextlib.contextmanager
def without(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the model computes with the attention it had before install()."""
    before, parts = model.__dict__.get(PLACE) or {}, configured(model)
    ours = {name: part.config._attn_implementation for name, part in parts}
    try:
        for name, part in parts:
            part.config._attn_implementation_internal = before.get(name, ours[name])
        yield
    finally:
        for name, part in parts:
            part.config._attn_implementation_internal = ours[name]


def bring(model: torch.nn.Module, proven: bool = False) -> None:
    """Installs the kernels for an attachment, with which they leave. proven: they were compared before."""
    _install(model, None, proven)
    model.__dict__[BROUGHT] = id(model)


def copied(model: torch.nn.Module) -> bool:
    """Whether this is a copy of a model that had the kernels for its attachment's sake only."""
    return model.__dict__.get(BROUGHT, id(model)) != id(model)


def installed(model: torch.nn.Module) -> str | None:
    """The backend that install() gave this model."""
    name = str(model.config._attn_implementation)
    return backend_named(name) if model.__dict__.get(PLACE) and name.startswith(PREFIX) else None


def configured(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The parts of the model that say in their configuration which attention they have, by name."""
    return [(name, part) for name, part in model.named_modules() if hasattr(part, "set_attn_implementation")]
