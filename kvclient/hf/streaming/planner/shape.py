"""What a call of generate() takes beside the weights, by what it grows with.

Owns that arithmetic. Never looks at what is free. Invariant: every term is the most that its step holds at
one time; it rather says too much.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.awq.linear import TILE_BYTES, AwqLinear

BASE_BYTES = 48 << 20  # of allocators and threads, whatever is asked
KV_COPIES = 2  # a cache that grows by copying holds a layer's old and new; what was freed lies between
ROUNDED = 8  # an estimate rounds each of its terms up
HIDDEN_COPIES, FFN_COPIES, SCORE_COPIES = 10, 5, 3


@dataclass(frozen=True)
class Shape:
    """Bytes."""

    kv_token: int  # keys and values of a token, all layers
    hidden: int  # of a token in a piece of the prompt
    scores: int  # of a pair of tokens: masks, and scores where they are computed
    logits: int  # of a row
    fixed: int  # of a call

    @classmethod
    def of(cls, model: Any, streamed: bool, packed: bool, stored: Container[str] | None = None) -> Shape:
        """streamed: the head, at least, may be read in pieces; packed: it has packed words. stored: names of
        the checkpoint's tensors, where packed layers are still plain ones without memory; None: they are
        themselves. Raises InvalidArgument for a configuration that does not say its shape.
        """
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
        item_in_layer = max(item, 4) if packed else item
        hidden = HIDDEN_COPIES * width * max(item, 4) + FFN_COPIES * wide * item_in_layer
        hidden += 4 * (heads + 2 * kv_heads) * head_dim * max(item, 4)
        eager = model.config._attn_implementation == "eager"
        scores = 1 + 4 + (SCORE_COPIES * heads * max(item, 4) if eager else 0)
        # A product may lay the matrix out anew: the largest there is, but not a streamed model's head.
        matrices = [
            module.weight.numel()
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and not (streamed and module is head)
            and (stored is None or f"{name}.weight" in stored)
        ]
        fixed = max(matrices, default=0) * item + (2 * TILE_BYTES if packed else 0)
        kv = KV_COPIES * layers * 2 * kv_heads * head_dim * item
        return cls(kv, hidden, scores, 8 * vocabulary * 4, BASE_BYTES + fixed)

    def kv(self, tokens: int) -> int:
        """Keys and values of so many tokens."""
        return self.kv_token * tokens

    def piece(self, chunk: int, tokens: int) -> int:
        """What a piece of so many tokens computes with, the last of them all."""
        return chunk * self.hidden + chunk * tokens * self.scores

    def call(self, tokens: int, chunk: int) -> int:
        """All of a call of one row, prompt and answer together, of which so many are computed at one time."""
        piece = self.piece(min(chunk, tokens), tokens)
        return self.kv(tokens) + piece + self.fixed + self.logits + ROUNDED


def is_packed(model: torch.nn.Module) -> bool:
    """Whether words of it are packed."""
    return any(isinstance(module, AwqLinear) for module in model.modules())
