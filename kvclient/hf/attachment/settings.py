"""What a thread sets for its calls of an attached model: bypass(), limited(), keeping(), roomy(), coded(),
salted().

Owns those settings and their bounds. Never runs a call. Invariant: leaving a `with` gives the thread back
what it had before, and no other thread has seen anything of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.blocks.codec import Kivi
from kvclient.blocks.identity import salt_of
from kvclient.checks import check_bounds
from kvclient.hf.attachment.model_state import ModelState
from kvclient.hf.call import Report
from kvclient.hf.request.options import Options
from kvclient.hf.request.served_model import codec_of

MOST_TOKENS = 1 << 24  # of a chain


@dataclass(frozen=True)
class Settings:
    """Where it says None, but for the codec, a call is as attach() was told."""

    codec: Kivi | None  # of blocks; None: they hold what was computed
    read: bool = True
    write: bool = True
    salt: bytes = b""  # beside attach()'s
    inside: bool = True  # what is no prefix is reused too
    publish_tokens: int | None = None
    follow: bool = True  # who computes what this call needs is waited for, where attach() was told so
    priority: int | None = None
    ttl_s: float | None = None
    tails: bool | None = None
    room: int | None = None
    static: bool = False  # memory does not move while tokens are chosen

    def over(self, options: Options) -> Options:
        """attach()'s options, with these in the place of what they change."""
        keeping = {"priority": self.priority, "ttl_s": self.ttl_s, "tails": self.tails}
        return dataclasses.replace(
            options, publish_tokens=self.publish_tokens, search=self.inside, static=self.static,
            room=self.room, follow=self.follow and options.follow,
            **{name: value for name, value in keeping.items() if value is not None},
        )  # fmt: skip


class ThisThread(threading.local):
    """What each thread has of an attachment: its settings, and the call that it runs."""

    def __init__(self, default: Settings) -> None:
        self.settings = self.default = default
        self.request: Any = None  # a Request
        self.trial: Any = None  # of kvclient.hf.proof.measure: what the call is made with instead
        self.last: Report | None = None
        self.usable: bool | None = None  # whether the model is, as it was looked at; None: each call looks
        self.begun: Callable[[Report | None], None] | None = None  # told where a pass over a prompt begins

    def begins(self) -> None:
        """A pass over a prompt begins now, or the loop that computes it: what it will leave is claimed."""
        if self.begun is not None:
            self.begun(None if self.request is None else self.request.report)


class Scoped:
    """The part of an Attachment that a thread sets for its calls."""

    _local: ThisThread
    _model_state: ModelState

    @contextlib.contextmanager
    def looked_at(self, model: torch.nn.Module) -> Iterator[None]:
        """Within it, this thread's calls take the model as it is now: it is looked at for changes once, not
        for each. What they write is still looked at when it is sealed. One that cannot be looked at is left
        to each call, which says why.
        """
        with contextlib.suppress(Exception):
            self._local.usable = self._model_state.current(model)
        try:
            yield
        finally:
            self._local.usable = None

    @contextlib.contextmanager
    def set_here(self, **changes: Any) -> Iterator[None]:
        """Within it, this thread's Settings have these values."""
        before = self._local.settings
        self._local.settings = dataclasses.replace(before, **changes)
        try:
            yield
        finally:
            self._local.settings = before

    @contextlib.contextmanager
    def bypass(self, read: bool = True, write: bool = True) -> Iterator[None]:
        """Within it, this thread's calls do not read from the store, do not write to it, or neither."""
        before = self._local.settings
        with self.set_here(read=before.read and not read, write=before.write and not write):
            yield

    @contextlib.contextmanager
    def limited(
        self, inside: bool = True, publish_tokens: int | None = None, follow: bool = True
    ) -> Iterator[None]:
        """Within it, this thread's calls reuse nothing but prefixes (inside=False), wait for nobody who is
        computing them (follow=False), and publish no more than the first publish_tokens tokens of a prompt,
        and no generated text. Raises InvalidArgument for less than none.
        """
        if publish_tokens is not None:
            check_bounds("publish_tokens", publish_tokens, 0, MOST_TOKENS)
        with self.set_here(inside=inside, publish_tokens=publish_tokens, follow=follow):
            yield

    @contextlib.contextmanager
    def keeping(
        self, priority: int | None = None, ttl_s: float | None = None, tails: bool | None = None
    ) -> Iterator[None]:
        """Within it, the blocks that this thread's calls publish have these; None: as attach() was told.
        tails: what is left behind the last whole block is kept too, and found where a prompt goes on from it.
        Raises InvalidArgument out of attach()'s bounds.
        """
        limits = {"priority": priority, "ttl_s": ttl_s, "tails": tails}
        with self.set_here(**{name: value for name, value in limits.items() if value is not None}):
            self._local.settings.over(self._model_state.options).checked()
            yield

    @contextlib.contextmanager
    def roomy(self, tokens: int) -> Iterator[None]:
        """Within it, this thread's calls begin with memory for so many tokens behind their prompt, however
        many they may say; more are had as they come, at the price of a copy. Raises InvalidArgument for none.
        """
        check_bounds("tokens", tokens, 1, MOST_TOKENS)
        with self.set_here(room=tokens):
            yield

    @contextlib.contextmanager
    def coded(self, codec: str | Kivi) -> Iterator[None]:
        """Within it, this thread's calls store and find blocks of this codec instead of attach()'s: "int8",
        "int4", a Kivi, or "none" for blocks as computed. Those of one codec do not serve another. Raises
        InvalidArgument for one that this model's blocks cannot be held in.
        """
        chunker = self._model_state.options.chunker
        if (chosen := codec_of(codec, chunker)) is not None:
            self._model_state.served.form.coded(chosen).layout(chunker.most)
        with self.set_here(codec=chosen):
            yield

    @contextlib.contextmanager
    def salted(self, salt: bytes) -> Iterator[None]:
        """Within it, this thread's calls share KV only with calls under the same salt, beside attach()'s."""
        with self.set_here(salt=salt_of(salt)):
            yield
