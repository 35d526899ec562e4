"""What a router is told of the store, in vLLM's own format: which blocks have come to be in it, and which
of those have gone.

Owns the blocks that were saved and not yet told of; never tells a token, a salt or an adapter. Invariants: a
block is told of after every rank's part of it is in the store, as the store itself says; what was told as
stored is watched until it is told as removed; no more than MAX_AWAITED blocks are awaited, PATIENCE times
each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvclient.errors import InvalidArgument
from kvclient.integrations.watched import Watched

MAX_AWAITED = 65_536
PATIENCE = 200  # steps of the engine
MEDIUM = "CPU"


def checked_endpoints(config: Any) -> None:
    """Of vLLM's KVEventsConfig. Raises InvalidArgument if nothing is published, or to other machines."""
    if config is None or not config.enable_kv_cache_events:
        raise InvalidArgument(
            "enable_kv_events without vLLM's own --kv-events-config: nobody would publish them"
        )
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name)
        if config.publisher == "zmq" and endpoint and not _stays_here(endpoint):
            raise InvalidArgument(
                f"kv_events_config has {name} {endpoint!r}, which other machines reach without a password; "
                "enable_kv_events wants one on loopback or ipc://"
            )


def _stays_here(endpoint: str) -> bool:
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = urlsplit(endpoint).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Events:
    """Of one scheduler. `states` says of keys whether they are there, of every rank."""

    def __init__(self, states: Callable[[bytes], bytes], key_bytes: int, block_tokens: int) -> None:
        self._states, self._key_bytes, self._block_tokens = states, key_bytes, block_tokens
        self._awaited: deque[tuple[bytes, bytes, bytes | None, int]] = deque(maxlen=MAX_AWAITED)
        self._told: Watched[bytes] = Watched()

    def saved(self, keys: bytes, hashes: list[bytes], parent: bytes | None) -> None:
        """Blocks that the step under way writes: their keys, vLLM's hashes, and the hash before the first."""
        for i, name in enumerate(hashes):
            key = keys[i * self._key_bytes : (i + 1) * self._key_bytes]
            self._awaited.append((key, name, parent, PATIENCE))
            parent = name

    def take(self) -> Iterator[KVCacheEvent]:
        """What has changed. Blocks that go while the engine rests are told of in its next steps."""
        for name in self._told.gone(lambda keys: [bool(there) for there in self._states(b"".join(keys))]):
            yield self._removed(name)
        if not self._awaited:
            return
        awaited = list(self._awaited)
        self._awaited.clear()
        states = self._states(b"".join(key for key, _, _, _ in awaited))
        for (key, name, parent, patience), there in zip(awaited, states, strict=True):
            if there:
                yield self._stored(name, parent)
                self._told.add(key, name)
            elif patience > 1:
                self._awaited.append((key, name, parent, patience - 1))

    def _removed(self, name: bytes) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(name)], medium=MEDIUM, locality="LOCAL",
            ownership="kvstored",
        )  # fmt: skip

    def _stored(self, name: bytes, parent: bytes | None) -> BlockStored:
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(name)],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=[], block_size=self._block_tokens, lora_id=None, medium=MEDIUM, lora_name=None,
            locality="LOCAL", ownership="kvstored",
        )  # fmt: skip
