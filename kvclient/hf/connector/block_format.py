"""The form in which a model's K and V of one layer lie in a block: as computed, or quantised.

Owns reading and writing them. Never looks at tokens or keys. Invariant: write() then read() gives back what
was written, bit by bit without a codec, and within half a step of the codec with one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvclient.blocks.bfloat16 import bits
from kvclient.blocks.codec import Kivi
from kvclient.blocks.layout import CODEC_KIVI, Layout
from kvclient.errors import Closed, InvalidArgument
from kvclient.hf.cache.layer import array_dtype, as_array
from kvclient.hf.model.groups import LayerGroup
from kvclient.hf.model.structure import DTYPE_NAMES, KVShape
from kvclient.kernels import contract, cuda


@dataclass(frozen=True)
class BlockFormat:
    """Ids of layouts are no help to recognise one: a daemon numbers them anew. With no layer of the model in
    it (`of` is empty) it holds a mark of each token: that its text was computed up to there.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    codec: Kivi | None = None
    key_dim: int = 0  # 0: K and V apart, each head_dim wide; else side by side in head_dim, K first
    of: tuple[int, ...] | None = None  # the model's layers that are in it, in order; None: the first ones

    @classmethod
    def main(cls, kv: KVShape, codec: Kivi | None = None) -> BlockFormat:
        """Of the layers that need all tokens."""
        if kv.main is None:
            return cls(kv.layers, kv.heads, kv.head_dim, kv.dtype, codec, kv.key_dim)
        plain = cls(max(1, len(kv.main)), kv.heads, kv.head_dim, kv.dtype, None, kv.key_dim, kv.main)
        return plain.coded(codec)

    @classmethod
    def group(cls, group: LayerGroup, dtype: torch.dtype, codec: Kivi | None = None) -> BlockFormat:
        """Of a group of others."""
        size = len(group.layers), group.heads, group.head_dim
        return cls(*size, dtype, codec, group.key_dim, group.layers)

    def place(self, layer: int) -> int | None:
        """Where in a block that layer of the model stands; None: it is not in it."""
        if self.of is None:
            return layer if layer < self.layers else None
        return self.of.index(layer) if layer in self.of else None

    def coded(self, codec: Kivi | None) -> BlockFormat:
        """The same with this codec; there is nothing to quantise in marks."""
        return dataclasses.replace(self, codec=None if self.holds_marks else codec)

    @property
    def holds_marks(self) -> bool:
        """Whether its blocks hold no layer: all they say is how far a prompt is stored."""
        return self.of == ()

    @property
    def arrays(self) -> int:
        """The first dimension of a layer: 2 for K and V apart, 1 for K and V side by side."""
        return 1 if self.key_dim else 2

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, without what a block has besides."""
        if self.codec is not None:
            return self.layers * self.codec.bytes_per_token(self.heads, self.head_dim)
        return self.layers * self.arrays * self.heads * self.head_dim * self.dtype.itemsize

    def layout(self, block_tokens: int) -> Layout:
        """That of blocks of block_tokens tokens. Raises InvalidArgument for a codec that layers of such
        widths are not stored in."""
        shape = (self.layers, self.heads, self.head_dim)
        if self.codec is None:
            return Layout(*shape, DTYPE_NAMES[self.dtype], block_tokens, self.arrays)
        if self.key_dim:
            widths = f"K of {self.key_dim} and V of {self.head_dim - self.key_dim} elements"
            only = "they are stored as computed only"
            raise InvalidArgument(f"codec={self.codec.name!r} with {widths}: {only}")
        self.codec.check(block_tokens, self.head_dim)
        sizes = (self.codec.bytes_per_token(self.heads, self.head_dim),) * self.layers
        return Layout(*shape, "uint8", block_tokens, layer_bytes_per_token=sizes, codec=CODEC_KIVI)

    @property
    def parameters(self) -> dict[str, Any]:
        """The codec's part of the reuse identity."""
        return {"name": "none"} if self.codec is None else self.codec.parameters

    @property
    def step(self) -> int:
        """A block's tokens are a multiple of this."""
        return 1 if self.codec is None else self.codec.group

    def fits(self, view: Any, tokens: int, layer: int) -> bool:
        """Whether a block's layer is of this format, for so many tokens."""
        try:
            array = self._array(view, layer)
        except (Closed, InvalidArgument):
            return False
        if self.codec is None:
            return self._as_computed(array, tokens)
        length = tokens * self.codec.bytes_per_token(self.heads, self.head_dim)
        return array.dtype == np.uint8 and array.shape == (length,) and tokens % self.codec.group == 0

    def _as_computed(self, array: np.ndarray, tokens: int) -> bool:
        shape = (self.arrays, self.heads, tokens, self.head_dim)
        return array.shape == shape and array.dtype == array_dtype(self.dtype)

    def _array(self, view: Any, layer: int) -> np.ndarray:
        """A layer of a block; bfloat16 as its bits."""
        array = view.layer(layer)
        return bits(array) if self.dtype == torch.bfloat16 else array

    def read(self, view: Any, layer: int) -> np.ndarray:
        """[arrays, heads, tokens, head_dim] of that layer; bfloat16 as uint16. Without a codec, the
        block's own memory.
        """
        stored = self._array(view, layer)
        if self.codec is None:
            return stored
        out = np.empty((2, self.heads, view.tokens, self.head_dim), array_dtype(self.dtype))
        self.codec.decode(stored, out)
        return out

    def in_place(self, view: Any, layer: int) -> tuple[Any, Any]:
        """K and V of that layer where they lie, for kvclient.hf.attention.dense. Raises InvalidArgument where
        the block is not of this form.
        """
        stored = self._array(view, layer)
        if self.codec is None:
            if not self._as_computed(stored, view.tokens):
                is_now = f"{stored.dtype}{list(stored.shape)}"
                raise InvalidArgument(f"layer {layer} of a block is {is_now}: no K and V of {self}")
            return stored[0], stored[1]
        return self.codec.views(stored, view.tokens, self.heads, self.head_dim)

    def read_tensor(self, view: Any, layer: int) -> torch.Tensor:
        """A layer's elements [arrays, heads, tokens, head_dim], in place where nothing must be decoded."""
        if self.codec is None:
            return view.tensor(layer)
        tensor = torch.from_numpy(self.read(view, layer))
        return tensor.view(torch.bfloat16) if self.dtype == torch.bfloat16 else tensor

    def on_device(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's bytes of whole blocks, uint8 [blocks, bytes] on their device, of [arrays, heads, blocks,
        tokens, head_dim]; and, with a codec, an int32 [1] that is not 0 where it cannot hold one of them.
        """
        blocks = columns.shape[2]
        if self.codec is None:
            return columns.permute(2, 0, 1, 3, 4).contiguous().view(blocks, -1).view(torch.uint8), None
        sides = [side.transpose(0, 1).flatten(0, 1) for side in columns]  # of each block and head
        made = [cuda.quantise(side, self.codec.bits, group)
                for side, group in zip(sides, (self.codec.group, 0), strict=True)]  # fmt: skip
        (k, *k_scales, k_unfit), (v, *v_scales, v_unfit) = made
        parts = [part.view(torch.uint8).view(blocks, -1) for part in (k, v, *k_scales, *v_scales)]
        return torch.cat(parts, 1), k_unfit + v_unfit

    def write(self, block: Any, layer: int, source: torch.Tensor) -> None:
        """K and V [2, heads, tokens, head_dim] of a whole block. Raises NotQuantisable."""
        assert self.codec is not None, "without a codec, tokens are written as they come"
        if source.device.type in cuda.DEVICES and contract.cuda_lacks(source.device.index or 0) is None:
            _, heads, tokens, head_dim = source.shape
            views = self.codec.views(block.layer(layer), tokens, heads, head_dim)
            cuda.quantise_into(source, views)
            return
        self.codec.encode(as_array(source.to("cpu")), block.layer(layer))
