"""Whether a request fits into memory, before any of it runs.

    admission = Admission(model, memory=2 << 30)
    ids = admission.admit(ids, max_new_tokens=256)  # or RequestTooLarge, with the numbers
    model.generate(ids, prefill_chunk_size=admission.chunk, ...)

Owns the estimate of one call of generate(): what is held, keys and values, what a piece of the prompt
computes with, logits. Never allocates. Invariant: it rather says too much than too little: every term is
the most that its step holds at one time, and where a call was measured above the estimate, all later ones
are raised by that.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from kvclient.checks import check_bounds
from kvclient.errors import KVClientError
from kvclient.hf.streaming.device import DeviceStreams
from kvclient.hf.streaming.planner.shape import Shape, is_packed
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import free_memory

CHUNK = 512  # tokens of a prompt at one time
MOST_TOKENS = 1 << 24


class RequestTooLarge(KVClientError):
    """A request would take more memory than there is; has the numbers, and the longest prompt that fits."""

    def __init__(self, estimate: Estimate, memory: int, longest: int) -> None:
        told = f"{estimate.prompt} tokens and {estimate.new} new ones need {estimate.bytes} bytes"
        parts = f"{estimate.held} held, {estimate.kv} keys and values, {estimate.activations} activations, "
        parts += f"{estimate.logits} logits"
        super().__init__(f"{told} ({parts}); memory={memory}; the longest prompt that fits has {longest}")
        self.estimate, self.memory, self.longest = estimate, memory, longest


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak. held: weights and slots, which are there before and after."""

    prompt: int
    new: int
    held: int
    kv: int
    activations: int
    logits: int

    @property
    def working(self) -> int:
        """Bytes that the call needs beside weights."""
        return self.kv + self.activations + self.logits

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.held + self.working


class Admission:
    """memory: for weights, slots and the call; None: what is free where it computes once what stays of a
    streamed model is there, and what the model holds there. chunk: of the prompt, computed at one time
    (generate()'s prefill_chunk_size). raised: as often as much, for what was measured before. Raises
    InvalidArgument for a model whose configuration does not say its shape, StreamingFailed where it waits for
    a model.
    """

    def __init__(
        self, model: torch.nn.Module, memory: int | None = None, chunk: int = CHUNK, raised: float = 1.0
    ) -> None:
        check_bounds("chunk", chunk, 1, MOST_TOKENS)
        self.chunk, self.raised = chunk, raised
        streams = streams_of(model)
        self._shape = Shape.of(model, streams is not None, is_packed(model))
        self._held = _held(model)
        self._unpacked = getattr(streams, "unpacked", 0)  # of a device: a matrix of numbers
        self._embedding = getattr(streams, "embedding", None)  # that is read row by row
        self._others = 0  # bytes of its rows that calls under way may look up
        self.memory = _free(model) + self._held if memory is None else memory

    def of_pieces(self, chunk: int, memory: int, others: int = 0) -> Admission:
        """The same where so many tokens are computed at one time, in so much memory. others: rows() of calls
        that run meanwhile.
        """
        check_bounds("chunk", chunk, 1, MOST_TOKENS)
        made = copy.copy(self)
        made.chunk, made.memory, made._others = chunk, memory, others
        return made

    def rows(self, prompt: int, rows: int = 1) -> int:
        """Bytes that a call may look up at one time of an embedding that is read row by row; 0 without
        one.
        """
        return 0 if self._embedding is None else self._embedding.rows_bytes(rows * min(self.chunk, prompt))

    def rows_beyond(self, prompt: int, rows: int = 1) -> int:
        """Bytes of the estimate that are rows of such an embedding, of this call's and all others' together.
        """
        if self._embedding is None:
            return 0
        return int(self._embedding.beyond(rows * min(self.chunk, prompt), self._others) * self.raised)

    def estimate(self, prompt: int, new: int, rows: int = 1) -> Estimate:
        """Of `rows` prompts of so many tokens, and as many new ones for each."""
        for name, value in (("prompt", prompt), ("rows", rows)):
            check_bounds(name, value, 1, MOST_TOKENS)
        check_bounds("new", new, 0, MOST_TOKENS)
        parts = self._shape.kv(prompt + new), self._shape.piece(min(self.chunk, prompt), prompt + new)
        kv, piece = (self._up(rows * part) for part in parts)
        fixed = self._shape.fixed + self._unpacked
        logits = self._up(rows * self._shape.logits)
        activations = piece + self._up(fixed) + self.rows_beyond(prompt, rows)
        return Estimate(prompt, new, self._held, kv, activations, logits)

    def admit(self, ids: torch.Tensor, max_new_tokens: int, auto_truncate: bool = False) -> torch.Tensor:
        """ids [rows, tokens] as they may run: all of them, or with auto_truncate the last ones that fit.
        Raises RequestTooLarge.
        """
        rows, prompt = ids.shape
        estimate = self.estimate(prompt, max_new_tokens, rows)
        if estimate.bytes <= self.memory:
            return ids
        longest = self.longest(max_new_tokens, rows, prompt)
        if not auto_truncate or not longest:
            raise RequestTooLarge(estimate, self.memory, longest)
        return ids[:, -longest:]

    def fits(self, prompt: int, new: int, rows: int = 1) -> bool:
        """Whether it may run."""
        return self.estimate(prompt, new, rows).bytes <= self.memory

    def longest(self, max_new_tokens: int, rows: int = 1, most: int = MOST_TOKENS) -> int:
        """Tokens of the longest prompt that fits, at most `most`; 0: none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(middle, max_new_tokens, rows):
                low = middle
            else:
                high = middle - 1
        return low

    def measured(self, estimate: Estimate, working_bytes: int) -> None:
        """What a call that was estimated so took above `held`: later estimates are no less."""
        if estimate.working:
            self.raised = max(self.raised, self.raised * working_bytes / estimate.working)

    def _up(self, count: int) -> int:
        return int(count * self.raised) + 1


def _free(model: torch.nn.Module) -> int:
    """Behind what stays of a model that is still being read: that is counted as held."""
    streams = streams_of(model)
    if isinstance(streams, DeviceStreams):
        return streams.runtime.free()
    if streams is not None:
        streams.settle()
    return free_memory()


def _held(model: torch.nn.Module) -> int:
    streams = streams_of(model)
    if streams is not None:
        return streams.plan.bytes
    unique = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(tensor.nbytes for tensor in unique.values())
