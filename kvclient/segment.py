"""Where the parts of one block lie inside its extent: the Python side of native/core/format/layout.h.

Owns the arithmetic and the layout blob's format; never touches memory. Invariant: for every layout and token
count these offsets equal those of the native parser (tests/unit/test_layout.py compares them).

An extent of a block of n tokens, all parts on multiples of 512 bytes, zero padded:

    layer 0 | layer 1 | … | one CRC32C (u32) per layer | meta area of the client's | padding to 4,096
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

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
MAX_META_FIXED = 1 << 20
MAX_META_PER_TOKEN = 4096
MAX_LAYER_BYTES_PER_TOKEN = 1 << 24
MAX_NAME_BYTES = 256
MAX_BLOCK_BYTES = 1 << 39
MAX_LOAD_BYTES = 1 << 50  # that anybody can ask the time of: as much as a disk tier may hold
MAX_TTL_S = 10 * 366 * 86_400.0

_FIXED = struct.Struct("<4s9I")


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
        return self.layers_length(tokens) + round_up(4 * self.num_layers, LAYER_ALIGN)

    def meta_length(self, tokens: int) -> int:
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


def layout_blob(layout: Any) -> bytes:
    """The bytes of a Layout, or those that were given. Raises InvalidArgument for what has none."""
    try:
        if not isinstance(layout, Integral):  # of which bytes() would make as many zeros
            return bytes(layout)
    except (TypeError, ValueError):
        pass
    raise InvalidArgument(f"layout={layout!r:.80}; it must be a Layout or the bytes of one")


def check_bounds(what: str, value: int, low: int, high: int) -> None:
    """Raises InvalidArgument that names the value and the limit."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{what}={value!r}; it must be an integer in {low}..{high}")


def check_real(what: str, value: float, low: float, high: float) -> None:
    """The same of a number that need not be whole."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{what}={value!r}; it must be a number in {low}..{high}")


def whole_seconds(ttl_s: float | None) -> int:
    """Seconds to live as the daemon counts them, rounded up; 0 is for ever. Raises InvalidArgument."""
    if ttl_s is None:
        return 0
    if not isinstance(ttl_s, Real) or not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidArgument(f"ttl_s={ttl_s!r}; it must be None or above 0 and at most {MAX_TTL_S}")
    return math.ceil(ttl_s)
