"""The methods that attach() puts on a model instance: generate, and the steps inside it that begin a prompt.

Owns their code and nothing else. Never knows more of an attachment than that it runs calls. Bound to the
instance, so that a deep copy of the model is bound to the copy, which is not attached; and named as what they
stand for, because pickle stores a bound method by its name. Invariant: without an attachment they are what
the class has.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

PLACE = "_kvstored"  # where a model keeps its Attachment: in itself, so that both can be collected together


def generate(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What model.generate() is while a store is attached; the model's own once it is not."""
    attachment = model.__dict__.get(PLACE)
    if attachment is None:
        return type(model).generate(model, *args, **kwargs)
    return attachment._run(model, args, kwargs)


def _prefill(
    model: torch.nn.Module, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    attachment = model.__dict__.get(PLACE)
    prefill = (
        functools.partial(type(model)._prefill, model)
        if attachment is None
        else attachment._own(model, "_prefill")
    )

    def run(ids: torch.Tensor = input_ids) -> Any:
        return prefill(ids, generation_config, model_kwargs, *args, **kwargs)

    request = getattr(attachment._local, "request", None) if attachment is not None else None
    if request is None:
        return run()
    return request.prefill(model, run, input_ids, generation_config, model_kwargs)


def _get_candidate_generator(model: torch.nn.Module, **kwargs: Any) -> Any:
    """What a loop of assisted decoding begins with."""
    attachment = model.__dict__.get(PLACE)
    candidate_generator = type(model)._get_candidate_generator.__get__(model)
    if attachment is not None:
        candidate_generator = attachment._own(model, "_get_candidate_generator")
        attachment._ahead(model, kwargs)
    return candidate_generator(**kwargs)


HOOKS = {
    "generate": generate, "_prefill": _prefill, "_get_candidate_generator": _get_candidate_generator,
}  # fmt: skip


def chunked_reads(model: torch.nn.Module) -> bool:
    """Whether this release prefills in chunks on top of a filled cache."""
    # Releases whose _prefill knows of later iterations slice what a filled cache already holds, chunks
    # included.
    return "is_first_iteration" in inspect.signature(type(model)._prefill).parameters
