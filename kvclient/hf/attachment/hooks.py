"""The methods that attach() puts on a model instance: generate, and the steps inside it that begin a prompt.

Owns their code, and what stood in their place. Never knows more of an attachment than that it runs calls.
Bound to the instance, so that a deep copy of the model is bound to the copy, which is not attached; and named
as what they stand for, because pickle stores a bound method by its name. Invariant: without an attachment
they are what the class has.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from kvclient.hf.attachment import assisted, running

if TYPE_CHECKING:
    from kvclient.hf.attachment.attach import Attachment

PLACE = "_kvstored"  # where a model keeps its Attachment: in itself, so that both can be collected together


def generate(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What model.generate() is while a store is attached; the model's own once it is not."""
    attachment, plain = _attached(model, "generate")
    if attachment is None:
        return plain(*args, **kwargs)
    return running.run(attachment, plain, model, args, kwargs)


def _prefill(
    model: torch.nn.Module, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    attachment, prefill = _attached(model, "_prefill")

    def run(ids: torch.Tensor = input_ids) -> Any:
        return prefill(ids, generation_config, model_kwargs, *args, **kwargs)

    request = attachment._local.request if attachment is not None else None
    if request is None:
        return run()
    return request.prefill(model, run, input_ids, generation_config, model_kwargs)


def _get_candidate_generator(model: torch.nn.Module, **kwargs: Any) -> Any:
    """What a loop of assisted decoding begins with."""
    attachment, candidate_generator = _attached(model, "_get_candidate_generator")
    request = attachment._local.request if attachment is not None else None
    asked = [kwargs.get(name) for name in ("input_ids", "generation_config", "model_kwargs")]
    if request is not None and all(argument is not None for argument in asked):
        _, prefill = _attached(model, "_prefill")
        assisted.compute_ahead(request, prefill, model, *asked)
    return candidate_generator(**kwargs)


HOOKS = {
    "generate": generate, "_prefill": _prefill, "_get_candidate_generator": _get_candidate_generator,
}  # fmt: skip


def _attached(model: torch.nn.Module, name: str) -> tuple[Attachment | None, Any]:
    """Who takes the model's calls, and what the model has of this name without them."""
    attachment = model.__dict__.get(PLACE)
    before = None if attachment is None else attachment._before[name]
    return attachment, before if before is not None else functools.partial(getattr(type(model), name), model)


def install(attachment: Attachment, model: torch.nn.Module) -> None:
    """Puts HOOKS on the model; the attachment remembers what stood there."""
    for name, ours in HOOKS.items():
        if getattr(model.__dict__.get(name), "__func__", None) is ours:
            del model.__dict__[name]  # of the model that this one was copied from
    attachment._before = {name: model.__dict__.get(name) for name in HOOKS}
    for name, ours in HOOKS.items():
        model.__dict__[name] = types.MethodType(ours, model)
    model.__dict__[PLACE] = attachment


def put_back(attachment: Attachment, model: torch.nn.Module, name: str) -> None:
    """What install() took away; a method that the model was given since stays."""
    if getattr(model.__dict__.get(name), "__func__", None) is HOOKS[name]:
        del model.__dict__[name]
        if attachment._before[name] is not None:
            model.__dict__[name] = attachment._before[name]


def chunked_reads(model: torch.nn.Module) -> bool:
    """Whether this release prefills in chunks on top of a filled cache."""
    # Releases whose _prefill knows of later iterations slice what a filled cache already holds, chunks
    # included.
    return "is_first_iteration" in inspect.signature(type(model)._prefill).parameters
