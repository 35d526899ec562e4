"""generate() of a streamed model that was given a limit of memory: asked about before any of it runs.

Owns the method that is put on such a model, the room that its plan leaves for a request, and what calls under
way may take. Never looks at what is free. Invariant: all that is held, and all that calls under way may take,
is no more than the limit; what would be is a RequestTooLarge before anything is computed. A call that was
measured to take more than was said raises all later estimates by that.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.hf.streaming.planner.admission import CHUNK, Admission, RequestTooLarge
from kvclient.hf.streaming.planner.gauge import gauge_of
from kvclient.hf.streaming.planner.shape import Shape
from kvclient.hf.streaming.residency import WORKING_BYTES

MOST_RAISED = 2.0  # by what was measured: somebody else in the process may have taken it
PIECES = (CHUNK, CHUNK // 4)  # of a prompt that is too long to be computed at one time; each reads all layers
NEW_TOKENS = 20  # generate()'s own, where nobody says how many
OF_EACH_TOKEN = ("inputs", "input_ids", "attention_mask", "position_ids", "token_type_ids")
WHOLE = (  # who goes through a prompt by other ways than _prefill(), or says how
    "custom_generate", "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens",
    "inputs_embeds", "prefill_chunk_size",
)  # fmt: skip


def rooms(shape: Shape, tokens: int) -> list[int]:
    """Bytes that a plan leaves for requests: for one of so many tokens, and where that cannot be, for one
    token.
    """
    return [max(WORKING_BYTES, shape.call(count, PIECES[-1])) for count in (tokens, 2)]


@dataclass(frozen=True)
class Call:
    """What generate() was called for. chunk: tokens of the prompt at one time, where that was said."""

    rows: int
    prompt: int
    new: int
    chunk: int | None
    whole: bool

    @classmethod
    def of(cls, model: Any, asked: dict[str, Any]) -> Call:
        """asked: its arguments by name."""

        def said(name: str) -> Any:
            if asked.get(name) is not None:
                return asked[name]
            return getattr(asked.get("generation_config") or model.generation_config, name, None)

        named = ("inputs_embeds", "inputs", "input_ids")
        ids = next((asked[name] for name in named if asked.get(name) is not None), None)
        rows, prompt = (1, 1) if ids is None else ids.shape[:2]
        if (mask := asked.get("attention_mask")) is not None:
            prompt = max(prompt, mask.shape[-1])  # the first of them may lie in a cache
        new, length, chunk = said("max_new_tokens"), said("max_length"), said("prefill_chunk_size")
        new = new if new is not None else NEW_TOKENS if length is None else max(0, length - prompt)
        rows *= max(said("num_beams") or 1, said("num_return_sequences") or 1)
        whole = any(said(name) is not None for name in WHOLE) or said("use_cache") is False
        return cls(rows, max(1, prompt), new, chunk, whole)


class Asked:
    """Of one model, for any number of threads. pieces: what prompts are computed in; None: at one time where
    that fits, else in PIECES.
    """

    def __init__(self, memory: int, truncate: bool) -> None:
        self.memory = memory
        self.pieces: int | None = None
        self._truncate, self._lock, self._taken = truncate, threading.Lock(), 0
        self._running, self._rows = 0, 0  # calls under way, and what they may look up
        self._said = {"asked": 0, "in_pieces": 0, "truncated": 0, "refused": 0}
        self._raised = 1.0

    def report(self) -> dict[str, float]:
        """Calls so far: how many were asked about, computed in pieces, cut and refused; by how much estimates
        were raised.
        """
        with self._lock:
            return {**self._said, "raised": self._raised}

    @contextlib.contextmanager
    def call(self, model: Any, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The arguments, by name, that it may run with within the block. Raises RequestTooLarge."""
        call = Call.of(model, asked)
        admission = Admission(model, self.memory, raised=self._raised)
        with self._lock:
            self._said["asked"] += 1
            number, alone = self._said["asked"], not self._running
            memory = self.memory - self._taken
            tried = [admission.of_pieces(chunk, memory, self._rows) for chunk in self._chunks(call)]
            fits = (each for each in tried if each.fits(call.prompt, call.new, call.rows))
            chosen, prompt = next(fits, tried[-1]), call.prompt
            if not chosen.fits(prompt, call.new, call.rows):
                prompt = self._cut(chosen, call, asked)
            estimate, rows = chosen.estimate(prompt, call.new, call.rows), chosen.rows(prompt, call.rows)
            taken = estimate.working - chosen.rows_beyond(prompt, call.rows)  # those are of all calls at once
            self._taken, self._rows, self._running = (
                self._taken + taken, self._rows + rows, self._running + 1,
            )  # fmt: skip
            if not call.whole and prompt > chosen.chunk:
                asked["prefill_chunk_size"] = chosen.chunk
                self._said["in_pieces"] += 1
        measured = None
        try:
            gauge = gauge_of(model) if alone else None
            yield asked
            measured = gauge.taken() if gauge is not None else None
        finally:
            with self._lock:
                self._taken, self._rows, self._running = (
                    self._taken - taken, self._rows - rows, self._running - 1,
                )  # fmt: skip
                if measured is not None and self._said["asked"] == number:  # nobody else was there
                    chosen.measured(estimate, measured)
                    self._raised = min(MOST_RAISED, max(self._raised, chosen.raised))

    def serve(self, model: Any, chunk: int, rows: int) -> int:
        """From here on prompts are computed in pieces of so many tokens. Returns of how many tokens there is
        room for keys and values, of any number of requests, beside a pass over a piece and so many rows; 0:
        of none. Not for calls that other threads make meanwhile.
        """
        self.pieces = chunk
        admission = Admission(model, self.memory, chunk + rows, self._raised)
        more = (rows - 1) * admission.estimate(1, 0).logits
        return admission.of_pieces(chunk + rows, self.memory - more).longest(0)

    def _chunks(self, call: Call) -> Sequence[int]:
        """Tokens at one time, in the order in which they are tried."""
        if call.chunk is not None or call.whole:
            return [min(call.prompt, call.chunk or call.prompt)]
        if self.pieces is not None:
            return [self.pieces]
        return [call.prompt, *(piece for piece in PIECES if piece < call.prompt)]

    def _cut(self, chosen: Admission, call: Call, asked: dict[str, Any]) -> int:
        """The tokens that are left of a prompt that does not fit, if any may go. Raises RequestTooLarge."""
        longest = chosen.longest(call.new, call.rows, call.prompt)
        cached = any(asked.get(name) is not None for name in ("past_key_values", "cache", "inputs_embeds"))
        if cached or not (self._truncate and longest):
            self._said["refused"] += 1
            raise RequestTooLarge(chosen.estimate(call.prompt, call.new, call.rows), chosen.memory, longest)
        for name in OF_EACH_TOKEN:
            if isinstance(value := asked.get(name), torch.Tensor) and value.shape[-1] == call.prompt:
                asked[name] = value[..., -longest:]
        self._said["truncated"] += 1
        return longest


_asked: weakref.WeakKeyDictionary[torch.nn.Module, Asked] = weakref.WeakKeyDictionary()


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What model.generate() is of a streamed model with a limit. Raises RequestTooLarge. A copy of the model
    has the method and no limit."""
    if (asked := _asked.get(model)) is None:
        return type(model).generate(model, *args, **kwargs)
    positional = list(inspect.signature(type(model).generate).parameters)[1:]
    with asked.call(model, dict(zip(positional, args, strict=False)) | kwargs) as named:
        return type(model).generate(model, **named)


def install(model: Any, memory: int, truncate: bool) -> None:
    """From here on each call of the model's generate() is asked about."""
    _asked[model] = Asked(memory, truncate)
    model.__dict__["generate"] = types.MethodType(generate, model)


def asked_of(model: torch.nn.Module) -> Asked | None:
    """None: nobody asks."""
    return _asked.get(model)
