"""The layout of a block as a user names it, and the blob the daemon registers.

Owns the defaults and the checking of what users say; never touches memory: the arithmetic is that of
kvclient.segment. Invariant: a Layout that could be constructed is one the daemon accepts; equal layouts have
equal blobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvclient.errors import InvalidArgument
from kvclient.segment import (
    CODEC_NONE,
    DTYPES,
    MAX_HEAD_DIM,
    MAX_KV_HEADS,
    MAX_LAYERS,
    Geometry,
    check_bounds,
)

# The meta area's default size: a header of four u32 (magic, tokens, extra_words, reserved), the parent's
# prefix key, the content key; then per token an int32 id and a u64 extra id. Enough for a reader to
# verify and extend a match by itself.
META_HEADER_BYTES = 16
META_FIXED = META_HEADER_BYTES + 32 + 32
META_PER_TOKEN = 4 + 8


@dataclass(frozen=True)
class Layout:
    """How the KV of one chunk is arranged: per layer an array [kv_per_layer, num_kv_heads, tokens, head_dim].

    dtype: uint8, int8, float16, bfloat16 (as uint16 in NumPy) or float32. block_tokens: most tokens of one
    block. meta_fixed, meta_per_token: bytes of its meta area, into which kvclient writes a chain's tokens and
    keys; where they do not fit, blocks are found as prefixes only. layer_bytes_per_token overrides the sizes
    that follow from the shape, one per layer; such a block is read through `.view`. name: for people. codec:
    0, or 1 for kvclient.blocks.codec. Raises InvalidArgument that names the value and the limit.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_tokens: int = 128
    kv_per_layer: int = 2
    meta_fixed: int = META_FIXED
    meta_per_token: int = META_PER_TOKEN
    layer_bytes_per_token: tuple[int, ...] | None = None
    name: str = ""
    codec: int = CODEC_NONE  # otherwise a layer of a block is bytes, in the codec's arrangement

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"dtype={self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.layer_bytes_per_token is not None:
            try:
                object.__setattr__(self, "layer_bytes_per_token", tuple(self.layer_bytes_per_token))
            except TypeError:
                given = f"layer_bytes_per_token={self.layer_bytes_per_token!r}"
                raise InvalidArgument(f"{given}; it must be one size for each layer") from None
        if not isinstance(self.name, str):
            raise InvalidArgument(f"name={self.name!r}; it must be a str")
        for field, high in (
            ("num_layers", MAX_LAYERS),
            ("num_kv_heads", MAX_KV_HEADS),
            ("head_dim", MAX_HEAD_DIM),
        ):
            check_bounds(field, getattr(self, field), 1, high)
        _ = self.geometry  # checks the rest

    @cached_property
    def geometry(self) -> Geometry:
        sizes = self.layer_bytes_per_token
        if sizes is None:
            element = DTYPES[self.dtype][1]
            sizes = (self.kv_per_layer * self.num_kv_heads * self.head_dim * element,) * self.num_layers
        geometry = Geometry(
            self.num_layers,
            self.kv_per_layer,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_tokens,
            self.codec,
            self.meta_fixed,
            self.meta_per_token,
            sizes,
            self.name.encode(errors="surrogateescape"),
        )
        geometry.check()
        return geometry

    @classmethod
    def from_blob(cls, blob: bytes) -> Layout:
        """The layout of a registered blob. Raises InvalidArgument for anything else."""
        g = Geometry.from_blob(blob)
        per_token = g.kv_per_layer * g.num_kv_heads * g.head_dim * DTYPES[g.dtype][1]
        sizes = None if set(g.layer_bytes_per_token) == {per_token} else g.layer_bytes_per_token
        return cls(
            g.num_layers,
            g.num_kv_heads,
            g.head_dim,
            g.dtype,
            g.block_tokens,
            g.kv_per_layer,
            g.meta_fixed,
            g.meta_per_token,
            sizes,
            g.name.decode(errors="surrogateescape"),  # opaque: another client may have written any bytes
            g.codec,
        )

    def __bytes__(self) -> bytes:
        return self.geometry.to_blob()

    def layer_offset(self, layer: int, tokens: int | None = None) -> int:
        """Where `layer` starts in a block of `tokens` tokens (default: a full one)."""
        return self.geometry.layer_offset(layer, self._tokens(tokens))

    def layer_length(self, layer: int, tokens: int | None = None) -> int:
        """Bytes of that layer without its padding."""
        return self.geometry.layer_length(layer, self._tokens(tokens))

    def block_bytes(self, tokens: int | None = None) -> int:
        """Bytes of pool a block of `tokens` tokens takes, padding, checksums and meta area included."""
        return self.geometry.length(self._tokens(tokens))

    def meta_bytes(self, tokens: int | None = None) -> int:
        """Bytes of the client's meta area."""
        return self.geometry.meta_length(self._tokens(tokens))

    def _tokens(self, tokens: int | None) -> int:
        if tokens is None:
            return self.block_tokens
        check_bounds("tokens", tokens, 1, self.block_tokens)
        return tokens
