"""Under which keys the blocks lie that vLLM offloads: its own offload keys beneath all else that shapes them.

Owns the list of what must match, for the spec and for the tier; never touches a tensor. Invariant: two
engines share a key only if everything that the list names is equal. An algorithm whose hashes differ in every
process is refused at the start; where the engine's configuration was not found, hashes that are shorter than
those of SHA-256 name nothing unless PYTHONHASHSEED is set, and one log line says so.

vLLM hands a spec only an OffloadingConfig, which has neither the overrides of a model's configuration nor its
type, its quantization, its adapters or the algorithm of its hashes: two engines that differ in those would
take each other's KV. Its connector has the whole as an argument of its constructor, which makes the spec and
its manager (tests/engines/vllm/test_vllm_identity.py fails where it no longer does).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

import vllm
from vllm.config import VllmConfig

from kvclient._core import DerivedKeys
from kvclient.errors import InvalidArgument
from kvclient.integrations.vllm.identity import (
    anew,
    digest_of_model,
    draft_digest,
    engine_fields,
    weights_digest,
)

log = logging.getLogger("vllm.kvstored")
VERSION = 4  # of this list, of how a key is made and of how a block lies in the store
GROUP_BYTES = 4  # behind the hash in an offload key
REPRODUCIBLE_BYTES = 32


def engine_config() -> VllmConfig | None:
    """Of the engine that is being made by the caller's thread. None: nobody who makes this has one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            return found
        frame = frame.f_back
    return None


def _check_can_be_told_apart(engine: Any, options: dict[str, Any]) -> None:
    if engine is None:
        if not options["weights_digest"]:
            raise InvalidArgument(
                "vLLM's configuration was not found; say weights_digest, and change it with what shapes KV"
            )
    elif engine.lora_config is not None and not options["model_version"]:
        raise InvalidArgument(
            "adapters (enable_lora): vLLM tells an offloading spec nothing of an adapter's content; use "
            'KvstoredConnector, or say "model_version" and change it with the files of any adapter'
        )


class Resets:
    """Which requests go on with KV of before a reset: vLLM offers all of it to be stored once more, and
    nobody knows of which weights it is. Not thread-safe."""

    def __init__(self) -> None:
        self._with_kv: set[str] = set()  # requests that have run or loaded
        self._with_old_kv: set[str] = set()

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._with_old_kv

    def scheduled(self, context: Any) -> None:
        """vLLM's ScheduleEndContext. Those that were preempted compute all of it again."""
        self._with_kv.update(context.new_req_ids)
        self._with_old_kv.difference_update(context.preempted_req_ids)

    def loads(self, req_id: str) -> None:
        """The request has KV from now on."""
        self._with_kv.add(req_id)

    def finished(self, req_id: str) -> None:
        """The request has ended."""
        self._with_kv.discard(req_id)
        self._with_old_kv.discard(req_id)

    def reset(self) -> None:
        """vLLM forgets its KV, but for what those requests have."""
        self._with_old_kv |= self._with_kv


class OffloadNames:
    """Of one engine. `config` is vLLM's OffloadingConfig, `engine` its VllmConfig; `form`: how the bytes are
    taken; `whole_rows`: that a row is the same however the model is split, where vLLM says so. Raises
    InvalidArgument for what cannot be told apart, and for hashes that differ in every process."""

    def __init__(
        self, config: Any, engine: Any, options: dict[str, Any], form: str, whole_rows: bool = False
    ) -> None:
        _check_can_be_told_apart(engine, options)
        if engine is None:
            weights = digest_of_model(config.model.name, None, options)
        else:
            weights = weights_digest(engine, options)  # of its revision
        parallel = config.parallel
        split = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
        fields = {
            "version": VERSION,
            "form": form,
            "vllm": vllm.__version__,
            "weights": weights.hex(),
            "model_version": str(options["model_version"]),
            "dtype": str(config.model.dtype),
            "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
            "block_bytes": config.worker_kv_bytes_per_block,
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "layout": config.kv_cache_layout,
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
            "parallel": "any" if whole_rows and config.replicated_layout else split,
            "engine": None if engine is None else engine_fields(engine),
            "draft": None if engine is None else draft_digest(engine, options),
            "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        }
        text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
        self.identity = hashlib.sha256(text.encode()).digest()
        self._derived = DerivedKeys(self.identity)
        self.ranks, self.groups = parallel.world_size, len(config.groups)
        cache = config.cache
        # By a group's bytes in a key, how many tokens a chunk has, where vLLM may ask for a part of one, too.
        self.divided = {
            group.group_id.to_bytes(GROUP_BYTES, "big"): group.tokens_per_block * cache.blocks_per_chunk
            for group in config.groups
            if group.tokens_per_block > cache.tokens_per_hash
        }
        self._seeded = "PYTHONHASHSEED" in os.environ
        self._told = False

    def begin_anew(self) -> None:
        """Names that no other engine has, nor this one had before."""
        self.identity = anew(self.identity)
        self._derived = DerivedKeys(self.identity)

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
