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


def layout_facts(layout: Any) -> dict[str, Any]:
    """By the names of the protocol; bytes of a full block's layers."""
    _, kv, heads, dim, dtype, tokens, codec, _, _ = struct.unpack_from("<9I", layout.blob, 4)
    return {
        "id": layout.id,
        "digest": layout.digest.hex(),
        "num_layers": layout.num_layers,
        "kv_per_layer": kv,
        "num_kv_heads": heads,
        "head_dim": dim,
        "dtype": DTYPES[dtype],
        "codec": codec,
        "block_tokens": tokens,
        "block_bytes": layers_bytes(layout.blob, tokens),
        "blocks": layout.blocks,
        "on_disk": layout.on_disk,
        "sessions": layout.sessions,
    }


def layouts_text(layouts: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(layout["id"]),
            layout["digest"][:12],
            str(layout["num_layers"]),
            f"{layout['kv_per_layer']} x {layout['num_kv_heads']} x {layout['head_dim']}",
            layout["dtype"] + (f", codec {layout['codec']}" if layout["codec"] else ""),
            str(layout["block_tokens"]),
            approximate_size(layout["block_bytes"]),
            str(layout["blocks"]),
            str(layout["on_disk"]),
            str(layout["sessions"]),
        )
        for layout in layouts
    ]
    header = ("layout", "digest", "layers", "kv, heads, dim", "dtype", "tokens", "block")
    return table((*header, "blocks", "on disk", "sessions"), rows, right=frozenset((0, 2, 5, 6, 7, 8, 9)))
