"""A cache of bounded size: the first tokens and the most recent ones as computed, older ones quantised, the
oldest dropped.

Owns the memory of one conversation's KV. Never talks to the store. A token keeps the position it was computed
at; where the model turns its keys by it, the head's are turned on as others are dropped, so that no gap opens
and the model's positions do not run out. Invariant: between two calls of feed() every layer
holds the same tokens: all of the head, at most `older` behind it, and `recent` to `recent + group - 1` behind
those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvclient.blocks.codec import Kivi
from kvclient.blocks.reuse_plan import MOST_TOKENS
from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument
from kvclient.hf.cache.layer import array_dtype, as_array
from kvclient.hf.model.rope import Rope, probe_rope, reaches, turned_tensor
from kvclient.hf.model.structure import KVShape, Refused, check_structure, widest_window
from kvclient.hf.release import passing
from kvclient.kernels import NotQuantisable

MOST_POSITIONS = 1 << 17  # where a model's angles, products in single precision, are right to a hundredth


@dataclass(frozen=True)
class Window:
    """What of a conversation is kept. The system prompt, or without one its first tokens, comes on top."""

    recent: int = 512  # tokens in the model's own type
    older: int = 2048  # tokens before those, quantised; a multiple of the codec's group
    sink_tokens: int = 4  # the first tokens, kept like a system prompt where that is shorter
    codec: Kivi = field(default_factory=Kivi)

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Kivi):
            raise InvalidArgument(f"codec={self.codec!r}; it must be a Kivi")
        for name, low in (("recent", 1), ("older", 0), ("sink_tokens", 0)):
            check_bounds(name, getattr(self, name), low, MOST_TOKENS)
        if self.older % self.codec.group:
            raise InvalidArgument(f"older={self.older} is no multiple of the codec's {self.codec.group}")


@dataclass(frozen=True)
class Held:
    """What a conversation holds. Bytes are those of the memory itself, scales and flags included."""

    tokens: int  # said and answered so far, dropped ones included
    head_tokens: int
    older_tokens: int
    recent_tokens: int
    dropped_tokens: int
    head_bytes: int
    older_bytes: int
    recent_bytes: int
    working_bytes: int  # most that this process handed attention besides: one layer's tokens, dense
    full_bytes: int  # what the tokens held would take in the model's own type
    not_quantisable: int  # groups of older tokens, of all layers, that stay in the model's type

    @property
    def bytes(self) -> int:
        """Of head, older and recent tokens together."""
        return self.head_bytes + self.older_bytes + self.recent_bytes

    @property
    def saved_bytes(self) -> int:
        """By quantising: what is dropped is lost, not saved."""
        return self.full_bytes - self.bytes


class WindowLayer(DynamicLayer):
    """One layer. The model sees all that is held, dense, for as long as it attends to it."""

    def __init__(self, kv: KVShape, window: Window, device: torch.device, index: int) -> None:
        super().__init__()
        self.index = index
        self.rope: Rope | None = None
        self.shift = 0  # positions that the head is turned on by
        self._turned: tuple[int, torch.Tensor] | None = None  # the head so turned, and by how much
        self.kv, self.window, self.device, self.dtype = kv, window, device, kv.dtype
        self.head = self.recent = self._empty(0)
        self.older: list[np.ndarray | torch.Tensor] = []  # groups; a tensor where the codec could not hold it
        self.working_bytes = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.recent = torch.cat([self.recent, torch.stack([key_states[0], value_states[0]])], dim=2)
        dense = self._empty(self.get_seq_length())
        at = 0
        for part in (self._placed_head(), *self.older, self.recent):
            states = part if isinstance(part, torch.Tensor) else self._dequantised(part)
            dense[:, :, at : at + states.shape[2]] = states
            at += states.shape[2]
        self.working_bytes = max(self.working_bytes, dense.nbytes)
        return dense[0][None], dense[1][None]

    def get_seq_length(self) -> int:
        return self.head.shape[2] + len(self.older) * self.window.codec.group + self.recent.shape[2]

    def settle(self, head_tokens: int) -> int:
        """Brings what was added into its class. Says how many tokens were dropped."""
        group = self.window.codec.group
        missing = min(head_tokens - self.head.shape[2], self.recent.shape[2])
        if missing > 0:
            self.head = torch.cat([self.head, self.recent[:, :, :missing]], dim=2)
            self.recent = self.recent[:, :, missing:].clone()
        dropped, start = 0, 0
        while self.recent.shape[2] - start >= self.window.recent + group:
            self.older.append(self._quantised(self.recent[:, :, start : start + group]))
            start += group
            if len(self.older) * group > self.window.older:
                self.older.pop(0)
                dropped += group
        if start:
            self.recent = self.recent[:, :, start:].clone()
        return dropped

    def _placed_head(self) -> torch.Tensor:
        if not self.shift or self.rope is None:
            return self.head
        if self._turned is None or self._turned[0] != self.shift:
            keys = turned_tensor(self.rope, self.index, self.head[0], self.shift)
            self._turned = self.shift, torch.stack([keys, self.head[1]])
        return self._turned[1]

    def quantised_bytes(self) -> int:
        """Of one group."""
        codec = self.window.codec
        return codec.group * codec.bytes_per_token(self.kv.heads, self.kv.head_dim)

    def _quantised(self, tokens: torch.Tensor) -> np.ndarray | torch.Tensor:
        out = np.zeros(self.quantised_bytes(), np.uint8)
        try:
            self.window.codec.encode(as_array(tokens.to("cpu").contiguous()), out)
        except NotQuantisable:
            return tokens.clone()
        return out

    def _dequantised(self, stored: np.ndarray) -> torch.Tensor:
        shape = (2, self.kv.heads, self.window.codec.group, self.kv.head_dim)
        out = np.empty(shape, array_dtype(self.kv.dtype))
        self.window.codec.decode(stored, out)
        tensor = torch.from_numpy(out)
        return tensor.view(torch.bfloat16) if self.kv.dtype == torch.bfloat16 else tensor

    def _empty(self, tokens: int) -> torch.Tensor:
        size = (2, self.kv.heads, tokens, self.kv.head_dim)
        return torch.empty(size, dtype=self.kv.dtype, device=self.device)


class WindowCache:
    """The KV of one text that only grows at its end, in any model with full attention."""

    def __init__(self, model: torch.nn.Module, window: Window) -> None:
        """Raises Refused, with the reason, for other models."""
        self.kv = check_structure(model)
        self.window = window
        self.head_tokens = window.sink_tokens
        self.tokens = self.dropped = 0
        config = model.config.get_text_config(decoder=True)
        if tokens := widest_window(config):
            raise Refused(
                f"{type(model).__name__} has layers that see {tokens} tokens, counted by columns of the "
                "cache: they would see others once some are dropped"
            )
        if not self.kv.plain or self.kv.latent:
            what = "recurrent layers" if self.kv.states else "K and V of different shapes"
            raise Refused(f"{type(model).__name__} has {what}: no bounded memory holds them")
        self._limit = getattr(config, "max_position_embeddings", None)
        self._placed = "position_ids" in inspect.signature(model.forward).parameters
        self._model = model
        self._asked, self._turns = False, None
        self._cache = DynamicCache(config=config)
        self.layers = [WindowLayer(self.kv, window, model.device, i) for i in range(self.kv.layers)]
        self._cache.layers[:] = self.layers

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        """Computes tokens behind all others. The logits [1, vocabulary] of the one that follows."""
        self.check_room(len(ids))
        logits = None
        for start in range(0, len(ids), step := self._step):
            self._turn_head()
            part = torch.tensor([list(ids[start : start + step])], device=self._model.device)
            count, columns = part.shape[1], self.layers[0].get_seq_length()
            inputs: dict[str, Any] = {"attention_mask": torch.ones((1, columns + count), dtype=torch.int64)}
            inputs["attention_mask"] = inputs["attention_mask"].to(part.device)
            if self._placed:
                first = self.tokens
                inputs["position_ids"] = torch.arange(first, first + count, device=part.device)[None]
            out = self._model(input_ids=part, use_cache=True, **inputs, **passing(self._cache))
            logits = out.logits[0, -1]
            self.tokens += count
            self.dropped += max([layer.settle(self.head_tokens) for layer in self.layers])  # all the same
        assert logits is not None, "there is no token to feed"
        return logits

    def keep(self) -> Callable[[], None]:
        """What puts back what is held now. It copies nothing: tokens are never written in place."""
        layers = [(layer, layer.head, list(layer.older), layer.recent, layer.shift) for layer in self.layers]
        tokens, dropped = self.tokens, self.dropped

        def back() -> None:
            for layer, head, older, recent, shift in layers:
                layer.head, layer.older, layer.recent, layer.shift = head, older, recent, shift
            self.tokens, self.dropped = tokens, dropped

        return back

    @property
    def _step(self) -> int:
        return max(self.window.recent, self.window.codec.group)

    def _turn_head(self) -> None:
        if self.dropped and (rope := self._rope()) is not None:
            for layer in self.layers:
                layer.rope, layer.shift = rope, self.dropped

    def _rope(self) -> Rope | None:
        """How the model turns its keys; None if a head must keep its place. Asked at the first drop."""
        if not self._asked:
            self._asked = True
            try:
                rope = probe_rope(self._model)
                self._turns = rope if reaches(self._model, rope, MOST_POSITIONS) else None
            except Refused:
                pass
        return self._turns

    def check_room(self, count: int) -> None:
        """Raises InvalidArgument if the model has no positions for `count` more tokens."""
        if self._limit is None or self.tokens + count <= self._limit:
            return
        most = (
            self.head_tokens + self.window.older + self.window.recent + self.window.codec.group + self._step
        )
        near = most <= self._limit and self.tokens + count <= MOST_POSITIONS
        if not near or self._rope() is None:
            raise InvalidArgument(
                f"{self.tokens} tokens and {count} more; the model has {self._limit} positions, and tokens"
                " keep theirs: this conversation has ended"
            )

    @property
    def held(self) -> Held:
        """Bytes of each of its parts, beside what all tokens would take."""

        def size(parts: list[Any]) -> int:
            return sum(part.nbytes for part in parts)

        first, group = self.layers[0], self.window.codec.group
        groups = [group for layer in self.layers for group in layer.older]
        per_token = 2 * self.kv.heads * self.kv.head_dim * self.kv.dtype.itemsize * self.kv.layers
        return Held(
            tokens=self.tokens,
            head_tokens=first.head.shape[2],
            older_tokens=len(first.older) * group,
            recent_tokens=first.recent.shape[2],
            dropped_tokens=self.dropped,
            head_bytes=size([layer.head for layer in self.layers]),
            older_bytes=size(groups),
            recent_bytes=size([layer.recent for layer in self.layers]),
            working_bytes=max(layer.working_bytes for layer in self.layers),
            full_bytes=first.get_seq_length() * per_token,
            not_quantisable=sum(isinstance(group, torch.Tensor) for group in groups),
        )
