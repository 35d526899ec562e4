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

from dataclasses import dataclass
from typing import Any

import torch

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument, KVClientError
from kvclient.hf.awq.linear import TILE_BYTES, AwqLinear
from kvclient.hf.streaming.device import DeviceStreams
from kvclient.hf.streaming.model import streams_of
from kvclient.hf.streaming.residency import free_memory

CHUNK = 512  # tokens of a prompt at one time
BASE_BYTES = 48 << 20  # of allocators and threads, whatever is asked
MOST_TOKENS = 1 << 24
KV_COPIES = 2  # a cache that grows by copying holds a layer's old and new; what was freed lies between
HIDDEN_COPIES, FFN_COPIES, SCORE_COPIES = 10, 5, 3


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
    (generate()'s prefill_chunk_size). Raises InvalidArgument for a model whose configuration does not say its
    shape, StreamingFailed where it waits for a model.
    """

    def __init__(self, model: torch.nn.Module, memory: int | None = None, chunk: int = CHUNK) -> None:
        check_bounds("chunk", chunk, 1, MOST_TOKENS)
        self.chunk, self._raised = chunk, 1.0
        self._shape = _Shape.of(model)
        self._held = _held(model)
        self.memory = _free(model) + self._held if memory is None else memory

    def estimate(self, prompt: int, new: int, rows: int = 1) -> Estimate:
        """Of `rows` prompts of so many tokens, and as many new ones for each."""
        for name, value in (("prompt", prompt), ("rows", rows)):
            check_bounds(name, value, 1, MOST_TOKENS)
        check_bounds("new", new, 0, MOST_TOKENS)
        parts = self._shape.kv(prompt + new), self._shape.piece(min(self.chunk, prompt), prompt + new)
        kv, piece = (self._up(rows * part) for part in parts)
        fixed = self._up(BASE_BYTES + self._shape.fixed)
        return Estimate(prompt, new, self._held, kv, piece + fixed, self._up(rows * self._shape.logits))

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

    def longest(self, max_new_tokens: int, rows: int = 1, most: int = MOST_TOKENS) -> int:
        """Tokens of the longest prompt that fits, at most `most`; 0: none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.estimate(middle, max_new_tokens, rows).bytes <= self.memory:
                low = middle
            else:
                high = middle - 1
        return low

    def measured(self, estimate: Estimate, working_bytes: int) -> None:
        """What a call that was estimated so took above `held`: later estimates are no less."""
        if estimate.working:
            self._raised = max(self._raised, self._raised * working_bytes / estimate.working)

    def _up(self, count: int) -> int:
        return int(count * self._raised) + 1


@dataclass(frozen=True)
class _Shape:
    """Bytes by what they grow with."""

    kv_token: int  # keys and values of a token, all layers
    hidden: int  # of a token in a piece of the prompt
    scores: int  # of a pair of tokens: masks, and scores where they are computed
    logits: int  # of a row
    fixed: int  # of a call

    @classmethod
    def of(cls, model: Any) -> _Shape:
        config = model.config.get_text_config(decoder=True)
        try:
            layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            head_dim = getattr(config, "head_dim", None) or width // heads
            vocabulary = config.vocab_size
        except AttributeError as error:
            raise InvalidArgument(f"the configuration does not say its shape: {error}") from None
        item = model.dtype.itemsize
        # The widest that a feed-forward part makes of a token, experts included, and in fp32 where packed
        # words are multiplied.
        wide = [module.out_features for module in model.modules() if hasattr(module, "out_features")]
        head = model.get_output_embeddings()
        wide = max([out for out in wide if head is None or out != head.out_features], default=4 * width)
        packed = [module for module in model.modules() if isinstance(module, AwqLinear)]
        item_in_layer = max(item, 4) if packed else item
        hidden = HIDDEN_COPIES * width * max(item, 4) + FFN_COPIES * wide * item_in_layer
        hidden += 4 * (heads + 2 * kv_heads) * head_dim * max(item, 4)
        eager = model.config._attn_implementation == "eager"
        scores = 1 + 4 + (SCORE_COPIES * heads * max(item, 4) if eager else 0)
        # A product may lay the matrix out anew: the largest there is, but not a streamed model's head.
        held = head if streams_of(model) is not None else None
        matrices = [_largest(module) for module in model.modules() if module is not held]
        fixed = max(matrices, default=0) * item + (2 * TILE_BYTES if packed else 0)
        kv = KV_COPIES * layers * 2 * kv_heads * head_dim * item
        return cls(kv, hidden, scores, 8 * vocabulary * 4, fixed)

    def kv(self, tokens: int) -> int:
        return self.kv_token * tokens

    def piece(self, chunk: int, tokens: int) -> int:
        return chunk * self.hidden + chunk * tokens * self.scores


def _largest(module: torch.nn.Module) -> int:
    """Elements of a linear layer's matrix."""
    return module.weight.numel() if isinstance(module, torch.nn.Linear) else 0


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
