"""What `kvstored layouts` tells: what each layout of a namespace is, and how many blocks have it.

Owns nothing. Invariant: a blob is read as docs/formats.md says, and was accepted by the store before.
"""

from __future__ import annotations

import struct
from typing import Any

from kvstored.cli.render import table
from kvstored.config.units import approximate_size
from kvstored.rpc.layouts import layers_bytes

DTYPES = ("uint8", "float16", "bfloat16", "float32", "int8")  # by number, as in native/core/format/layout.h


def layout_facts(one: Any) -> dict[str, Any]:
    """By the names of the protocol; bytes of a full block's layers."""
    _, kv, heads, dim, dtype, tokens, codec, _, _ = struct.unpack_from("<9I", one.blob, 4)
    return {
        "id": one.id,
        "digest": one.digest.hex(),
        "num_layers": one.num_layers,
        "kv_per_layer": kv,
        "num_kv_heads": heads,
        "head_dim": dim,
        "dtype": DTYPES[dtype],
        "codec": codec,
        "block_tokens": tokens,
        "block_bytes": layers_bytes(one.blob, tokens),
        "blocks": one.blocks,
        "on_disk": one.on_disk,
        "sessions": one.sessions,
    }


def layouts_text(layouts: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(one["id"]),
            one["digest"][:12],
            str(one["num_layers"]),
            f"{one['kv_per_layer']} x {one['num_kv_heads']} x {one['head_dim']}",
            one["dtype"] + (f", codec {one['codec']}" if one["codec"] else ""),
            str(one["block_tokens"]),
            approximate_size(one["block_bytes"]),
            str(one["blocks"]),
            str(one["on_disk"]),
            str(one["sessions"]),
        )
        for one in layouts
    ]
    header = ("layout", "digest", "layers", "kv, heads, dim", "dtype", "tokens", "block")
    return table((*header, "blocks", "on disk", "sessions"), rows, right=frozenset((0, 2, 5, 6, 7, 8, 9)))
