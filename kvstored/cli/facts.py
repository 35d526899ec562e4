"""What the commands tell of a block, and of peers, from the daemon's answer.

Owns nothing. Invariant: what the daemon has not read is None, and never a number that looks like one; a
daemon without a pool across machines tells of none.
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
