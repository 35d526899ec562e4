"""The layout of a block: as a user names it, as the daemon registers it, and where its parts lie in an
extent.

Owns the defaults, the checking, the arithmetic and the layout blob's format: the Python side of
native/core/format/layout.h. Never touches memory. Invariants: a Layout that could be constructed is one the
daemon accepts; equal layouts have equal blobs; for every layout and token count the offsets equal those of
the native parser (tests/unit/formats/test_layout.py compares them).

An extent of a block of n tokens, all parts on multiples of 512 bytes, zero padded:

    layer 0 | layer 1 | … | one CRC32C (u32) per layer | meta area of the client's | padding to 4,096
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument

MAGIC = b"KVL1"
LAYER_ALIGN = 512
PAGE_BYTES = 4096
CODEC_NONE = 0
CODEC_KIVI = 1  # kvclient.blocks.codec: a layer is bytes

# dtype name -> (code in the blob, bytes per element)
DTYPES = {"uint8": (0, 1), "float16": (1, 2), "bfloat16": (2, 2), "float32": (3, 4), "int8": (4, 1)}
DTYPE_NAMES = {code: name for name, (code, _) in DTYPES.items()}

MAX_LAYERS = 512
MAX_KV_HEADS = 65_536
MAX_HEAD_DIM = 65_536
MAX_BLOCK_TOKENS = 65_535
DEFAULT_BLOCK_TOKENS = 128  # one for all: KV is found only in blocks of the size it was published in
MAX_META_FIXED = 1 << 20
MAX_META_PER_TOKEN = 4096
MAX_LAYER_BYTES_PER_TOKEN = 1 << 24
MAX_NAME_BYTES = 256
MAX_BLOCK_BYTES = 1 << 39
MAX_LOAD_BYTES = 1 << 50  # that anybody can ask the time of: as much as a disk tier may hold

_FIXED = struct.Struct("<4s9I")

# The meta area's default size: a header of four u32 (magic, tokens, extra_words, reserved), the parent's
# prefix key, the content key; then per token an int32 id and a u64 extra id. Enough for a reader to
# verify and extend a match by itself.
META_HEADER_BYTES = 16
META_FIXED = META_HEADER_BYTES + 32 + 32
META_PER_TOKEN = 4 + 8


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


@dataclass(frozen=True)
class Geometry:
    """The numbers of a layout blob, and what follows from them for a block of `tokens` tokens."""

    num_layers: int
    kv_per_layer: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    codec: int
    meta_fixed: int
    meta_per_token: int
    layer_bytes_per_token: tuple[int, ...]
    name: bytes = b""

    @classmethod
    def from_blob(cls, blob: bytes) -> Geometry:
        """Parses a layout blob. Raises InvalidArgument that names what is wrong with it."""
        blob = bytes(blob)
        if len(blob) < _FIXED.size:
            raise InvalidArgument(f"layout blob of {len(blob)} bytes; its fixed part alone has {_FIXED.size}")
        magic, layers, kv, heads, dim, code, tokens, codec, fixed, per_token = _FIXED.unpack_from(blob)
        if magic != MAGIC:
            raise InvalidArgument(f"layout blob starts with {magic!r}; expected {MAGIC!r}")
        check_bounds("num_layers", layers, 1, MAX_LAYERS)
        if code not in DTYPE_NAMES:
            raise InvalidArgument(f"layout dtype code {code}; known are {sorted(DTYPE_NAMES)}")
        end = _FIXED.size + 4 * layers
        if not end <= len(blob) <= end + MAX_NAME_BYTES:
            limit = f"{layers} layers need {end} and a name of at most {MAX_NAME_BYTES}"
            raise InvalidArgument(f"layout blob of {len(blob)} bytes; {limit}")
        sizes = struct.unpack_from(f"<{layers}I", blob, _FIXED.size)
        geometry = cls(
            layers, kv, heads, dim, DTYPE_NAMES[code], tokens, codec, fixed, per_token, sizes, blob[end:]
        )
        geometry.check()
        return geometry

    def check(self) -> None:
        """Raises InvalidArgument with the value and the limit if a number is out of its bounds."""
        check_bounds("num_layers", self.num_layers, 1, MAX_LAYERS)
        check_bounds("kv_per_layer", self.kv_per_layer, 1, 2)
        check_bounds("num_kv_heads", self.num_kv_heads, 1, MAX_KV_HEADS)
        check_bounds("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        check_bounds("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        check_bounds("codec", self.codec, CODEC_NONE, CODEC_KIVI)
        check_bounds("meta_fixed", self.meta_fixed, 0, MAX_META_FIXED)
        check_bounds("meta_per_token", self.meta_per_token, 0, MAX_META_PER_TOKEN)
        check_bounds("len(name)", len(self.name), 0, MAX_NAME_BYTES)
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        if len(self.layer_bytes_per_token) != self.num_layers:
            raise InvalidArgument(
                f"{len(self.layer_bytes_per_token)} layer sizes for num_layers={self.num_layers}"
            )
        for size in self.layer_bytes_per_token:
            check_bounds("layer_bytes_per_token", size, 1, MAX_LAYER_BYTES_PER_TOKEN)
        check_bounds("bytes of a full block", self.length(self.block_tokens), 1, MAX_BLOCK_BYTES)

    def to_blob(self) -> bytes:
        """The bytes register_layout takes."""
        code = DTYPES[self.dtype][0]
        fixed = _FIXED.pack(
            MAGIC,
            self.num_layers,
            self.kv_per_layer,
            self.num_kv_heads,
            self.head_dim,
            code,
            self.block_tokens,
            self.codec,
            self.meta_fixed,
            self.meta_per_token,
        )
        return fixed + struct.pack(f"<{self.num_layers}I", *self.layer_bytes_per_token) + self.name

    def layer_length(self, layer: int, tokens: int) -> int:
        """Bytes of that layer without its padding."""
        return self.layer_bytes_per_token[layer] * tokens

    def layer_offset(self, layer: int, tokens: int) -> int:
        """Where that layer starts in the extent."""
        return sum(round_up(size * tokens, LAYER_ALIGN) for size in self.layer_bytes_per_token[:layer])

    def layers_length(self, tokens: int) -> int:
        """Bytes of all layers with their padding; the checksums start here."""
        return self.layer_offset(self.num_layers, tokens)

    def meta_offset(self, tokens: int) -> int:
        """Where the meta area of a block of so many tokens begins, in bytes from the block's beginning."""
        return self.layers_length(tokens) + round_up(4 * self.num_layers, LAYER_ALIGN)

    def meta_length(self, tokens: int) -> int:
        """The bytes of its meta area."""
        return self.meta_fixed + self.meta_per_token * tokens

    def length(self, tokens: int) -> int:
        """Bytes of the extent."""
        return round_up(self.meta_offset(tokens) + self.meta_length(tokens), PAGE_BYTES)

    def shaped(self, layer: int) -> bool:
        """Whether that layer is an array of the layout's shape. Under a codec, or where its size was given
        and is another, it is bytes."""
        elements = self.kv_per_layer * self.num_kv_heads * self.head_dim
        return (
            self.codec == CODEC_NONE
            and self.layer_bytes_per_token[layer] == elements * DTYPES[self.dtype][1]
        )

    def layer_shape(self, layer: int, tokens: int) -> tuple[int, ...]:
        """Shape of `.layer(layer)`."""
        if not self.shaped(layer):
            return (self.layer_length(layer, tokens),)
        return (self.kv_per_layer, self.num_kv_heads, tokens, self.head_dim)


@dataclass(frozen=True)
class Layout:
    """How the KV of one chunk is arranged: per layer an array [kv_per_layer, num_kv_heads, tokens, head_dim].

    dtype: uint8, int8, float16, bfloat16 (of ml_dtypes in NumPy) or float32. block_tokens: most tokens of one
    block. meta_fixed, meta_per_token: bytes of its meta area, into which kvclient writes a chain's tokens and
    keys; where they do not fit, blocks are found as prefixes only. layer_bytes_per_token overrides the sizes
    that follow from the shape, one per layer; such a block is read through `.view`. name: for people. codec:
    0, or 1 for kvclient.blocks.codec. Raises InvalidArgument that names the value and the limit.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_tokens: int = DEFAULT_BLOCK_TOKENS
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
                sizes = f"layer_bytes_per_token={self.layer_bytes_per_token!r}"
                raise InvalidArgument(f"{sizes}; it must be one size for each layer") from None
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
        """The same as numbers that the store counts with: bytes of a layer, of a token, of the meta area."""
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


def layout_blob(layout: Any) -> bytes:
    """The bytes of a Layout, or those that were given. Raises InvalidArgument for what has none."""
    try:
        if not isinstance(layout, Integral):  # of which bytes() would make as many zeros
            return bytes(layout)
    except (TypeError, ValueError):
        pass
    raise InvalidArgument(f"layout={layout!r:.80}; it must be a Layout or the bytes of one")
