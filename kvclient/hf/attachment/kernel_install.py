"""Whether an attachment reads the store's blocks where they lie, and the attention that this takes.

Owns that decision and its counting. Never takes from a user what was chosen: an attention that is not the one
transformers itself would have taken stays, and what is asked for by name is never answered by something else.
Invariant: a model that could be served in place and is not, is counted with the reason.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kvclient.blocks.identity import without_denied
from kvclient.errors import InvalidArgument
from kvclient.hf.attention import backends
from kvclient.hf.attention.handle import Reader
from kvclient.hf.attention.one_row import ONE_ROW
from kvclient.hf.attention.registered import count_fallback
from kvclient.hf.attention.switch import (
    BROUGHT,
    backend_of,
    bring,
    copied,
    install,
    installed,
    uninstall,
)
from kvclient.hf.cache.in_place import IN_PLACE_DEVICES
from kvclient.hf.cache.page_pool import PagePool
from kvclient.hf.model.code import Code
from kvclient.hf.model.identity import plain
from kvclient.hf.proof import verdicts


class Adopted:
    """The attention of one attachment's model. `in_place` as long as the kernels are what the model calls."""

    def __init__(
        self, model: torch.nn.Module, in_place: bool | None, paged_tokens: int | None = None
    ) -> None:
        """in_place: None takes the kernels where they fit. paged_tokens: what is computed lies in pages for
        so many, which is in place. Raises InvalidArgument if True cannot be had.
        """
        if in_place not in (None, True, False):
            raise InvalidArgument(f"in_place={in_place!r}; it must be True, False or None")
        if paged_tokens is not None:
            if in_place is False:
                raise InvalidArgument("paged=True reads blocks in place, which in_place=False forbids")
            in_place = True
        self.asked, self.paged_tokens = in_place is True, paged_tokens
        self._pool: PagePool | None = None
        self.wanted = in_place is not False
        self.left: str | None = None  # why not, as a word
        self._brought = False
        if copied(model):
            uninstall(model)
        if not self.wanted:
            return
        if reason := lacking(model, self.asked):
            self.wanted = False
            self._count(reason)
        elif installed(model) is None:
            try:
                _bring(model)
            except InvalidArgument:
                if self.asked:
                    raise
                self.wanted = False
                self._count("self_test")
                return
            self._brought = True

    def in_place(self, model: torch.nn.Module) -> Reader | None:
        """The model as what reads blocks in place; None if, as it is now, it does not. What was switched
        since is counted.
        """
        reader = Reader(model.config)
        if self.wanted and not reader():
            self._count("switched")
        return reader if self.wanted and reader() else None

    def _count(self, reason: str) -> None:
        self.left = reason
        count_fallback(reason)

    def pool(self, kv: Any, device: torch.device) -> PagePool | None:
        """The pages of an attachment to a model with such KV on that device; None if it has none. Raises
        InvalidArgument where no page fits all layers."""
        if self.paged_tokens is None:
            return None
        if len(sizes := kv.sizes) != 1:
            what = " and ".join(f"{heads} heads of {head_dim}" for heads, head_dim in sizes)
            raise InvalidArgument(f"paged=True: layers with K and V of {what}, where pages are of one shape")
        shape = (kv.layers, *sizes[0], kv.dtype, device)
        if self._pool is None or self._pool.shape != shape:
            self._pool = PagePool(*shape, self.paged_tokens)
        return self._pool

    def decline(self, model: torch.nn.Module, reason: str, why: str) -> bool:
        """What is stored cannot be read in place: whether the kernels leave. Raises InvalidArgument if that
        was asked for."""
        if self.asked:
            raise InvalidArgument(f"in_place=True: {type(model).__name__} {why}")
        wanted = self.wanted
        if wanted:
            self.give_up(model, reason)
        return wanted

    def give_up(self, model: torch.nn.Module, reason: str) -> None:
        """The model computes with its own attention again; counted under `reason`."""
        self.wanted = False
        self._count(reason)
        self.give_back(model)

    def give_back(self, model: torch.nn.Module) -> None:
        """The model has the attention again that it had before. Idempotent."""
        if self._brought and BROUGHT in model.__dict__:  # else taken off, and maybe installed, by the user
            uninstall(model)
        self._brought = False


def _bring(model: torch.nn.Module) -> None:
    """The kernels, proven once per kind of model, its code included, and machine."""
    config = plain(without_denied(model.config.to_dict()))
    facts = [type(model).__qualname__, config, str(model.device), str(model.dtype), Code(model).digest]
    name = verdicts.key("kernels", [*facts, backend_of(model).name])
    proven = verdicts.load(name) is not None
    bring(model, proven)
    if not proven:
        verdicts.save(name, {})


def lacking(model: torch.nn.Module, asked: bool = False) -> str | None:
    """Why this model is not served in place, as a word for counting; None: it can be.

    asked: by name. Raises InvalidArgument then, and if KVCLIENT_BACKEND names what cannot run here.
    """
    if asked and not type(model)._can_set_attn_implementation():
        install(model)  # raises, with the reason
    backend = backend_of(model)
    readable = backend.path is not None and backend.device in IN_PLACE_DEVICES
    if asked and not readable:
        raise InvalidArgument(f"in_place=True: the backend {backend.name} cannot read blocks where they lie")
    if not type(model)._can_set_attn_implementation():
        return "own_attention"
    if not readable:
        chosen = os.environ.get(backends.ENVIRONMENT) or installed(model) is not None
        unfit = backends.unfit(model.device, model.dtype, backends.head_dim_of(model))
        return backend.name if chosen else unfit or backend.name
    usual = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    if not asked and installed(model) is None and model.config._attn_implementation not in (usual, ONE_ROW):
        return "chosen_attention"  # eager gives the weights of attention, others have reasons of their own
    return None
