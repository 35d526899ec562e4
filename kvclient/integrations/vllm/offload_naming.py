"""Under which keys the blocks lie that vLLM offloads: its own offload keys beneath all else that shapes them.

Owns the list of what must match, for the spec and for the tier; never touches a tensor. Invariant: two
engines share a key only if everything that the list names is equal. vLLM does not tell an offloading spec
which hash algorithm it uses: hashes that are shorter than those of SHA-256 may differ in every process, and
name nothing unless PYTHONHASHSEED is set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from typing import Any

import vllm

from kvclient._core import DerivedKeys
from kvclient.integrations.vllm.identity import digest_of_model

log = logging.getLogger("vllm.kvstored")
VERSION = 2  # of this list, of how a key is made and of how a block lies in the store
GROUP_BYTES = 4  # behind the hash in an offload key
REPRODUCIBLE_BYTES = 32


class OffloadNames:
    """Of one engine. `config` is vLLM's OffloadingConfig; `form`: how the bytes are taken."""

    def __init__(self, config: Any, options: dict[str, Any], form: str) -> None:
        parallel = config.parallel
        fields = {
            "version": VERSION,
            "form": form,
            "vllm": vllm.__version__,
            "weights": digest_of_model(config.model.name, None, options).hex(),
            "model_version": str(options["model_version"]),
            "dtype": str(config.model.dtype),
            "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
            "block_bytes": config.worker_kv_bytes_per_block,
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "layout": config.kv_cache_layout,
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
            "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
            "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        }
        text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
        self.identity = hashlib.sha256(text.encode()).digest()
        self._derived = DerivedKeys(self.identity)
        self.ranks = parallel.world_size
        self._seeded = "PYTHONHASHSEED" in os.environ
        self._told = False

    def usable(self, key: bytes) -> bool:
        """Whether other processes would give this block the same hash."""
        if self._seeded or len(key) - GROUP_BYTES >= REPRODUCIBLE_BYTES:
            return True
        if not self._told:
            self._told = True
            log.warning(
                "kvstored: block hashes of %d bytes differ in every process: nothing is shared. Use "
                "--prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to one value for all engines",
                len(key) - GROUP_BYTES,
            )
        return False

    def whole(self, keys: Iterable[bytes]) -> list[bytes]:
        """The store's keys, not yet of a rank."""
        return self._derived.listed(list(keys))
