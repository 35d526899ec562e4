"""What the commands tell of a block, from the daemon's answer.

Owns nothing. Invariant: what the daemon has not read is None, and never a number that looks like one.
"""

from __future__ import annotations

from typing import Any

from kvstored.v1 import block_pb2

OF_THE_HEADER = ("token_count", "layout_id", "base_position", "priority", "created_ms")


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
