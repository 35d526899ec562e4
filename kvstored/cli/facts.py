"""What the commands tell of a block, of a layout and of peers, from the daemon's answer.

Owns nothing. Invariants: what the daemon has not read is None, and never a number that looks like one; a
daemon without a pool across machines tells of none; a layout's blob is read as docs/formats.md says, and was
accepted by the store before.
"""

from __future__ import annotations

import struct
from typing import Any

from kvstored.cli.render import table
from kvstored.config.units import approximate_size
from kvstored.rpc.layouts import layers_bytes
from kvstored.v1 import block_pb2

OF_THE_HEADER = ("token_count", "layout_id", "base_position", "priority", "created_ms")
DTYPES = ("uint8", "float16", "bfloat16", "float32", "int8")  # by number, as in native/core/format/layout.h


def block_facts(block: Any) -> dict[str, Any]:
    """Tokens, the layout's number, positions, bytes in memory and milliseconds, by the names of the protocol.

    None: a file whose header has not been read since the daemon started; length_bytes of any block that is on
    disk alone."""
    state = block_pb2.BlockState.Name(block.state).removeprefix("BLOCK_STATE_").lower()
    facts = {name: getattr(block, name) for name in (*OF_THE_HEADER, "generation", "length_bytes", "ttl_ms")}
    if block.token_count == 0:  # a file that was found by its name: its header is read when it is loaded
        facts.update(dict.fromkeys(OF_THE_HEADER))
    facts["length_bytes"] = facts["length_bytes"] or None
    return {"key": block.key.hex(), "state": state, **facts}


def peer_facts(reply: Any) -> dict[str, Any]:
    """The daemon's own node and listener, its peers with their counters, and the pool's under "cluster"."""
    texts = ("namespace", "node", "address", "state", "why")
    peers = [
        {name: getattr(peer, name) for name in texts} | dict(sorted(peer.counters.items()))
        for peer in reply.peers
    ]
    server = dict(sorted(reply.server.items()))
    found = {"node": reply.node, "listen": reply.listen, "server": server, "peers": peers}
    if reply.HasField("cluster"):
        pool = reply.cluster
        about = {name: getattr(pool, name) for name in ("master", "transport", "etcd_away")}
        found["cluster"] = {**about, "members": list(pool.members), **dict(sorted(pool.counters.items()))}
    return found


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
