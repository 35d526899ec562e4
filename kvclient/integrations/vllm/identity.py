"""Under which keys vLLM's blocks lie in the store: its own block hashes beneath everything else that shapes
their KV.

Owns the list of what must match; never touches a tensor. Invariant: two engines share a key only if all
that the list names is equal and vLLM itself takes the two prompts' blocks for the same (its hashes have
tokens, salt, media and adapter names in them). What differs misses; it never collides.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import cache
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform

from kvclient._core import DerivedKeys
from kvclient.errors import InvalidArgument
from kvclient.integrations.arguments import counted, fields_of, plain
from kvclient.integrations.checkpoint import checkpoint_digest, located
from kvclient.integrations.vllm.adapters import Adapters

VERSION = 4  # of the bytes that the worker writes, of this list and of how a key is made
KEY_BYTES = 32
PLACES = ("_name_or_path", "name_or_path")
REPRODUCIBLE_HASHES = ("sha256", "sha256_cbor")
# Kinds of positions and of models that vLLM computes otherwise where max_model_len is above their bound.
LENGTH_COUNTS = ("longrope", "su", "llama4", "llama4_text")
# Of MultiModalConfig what has no effect on the KV of what a request's hashes name.
QUIET_OF_MEDIA = (
    "language_model_only", "limit_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb",
    "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_hasher_algorithm", "mm_encoder_only",
    "interleave_mm_strings", "skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "mm_processor_device",
    "allow_missing_mm_embeddings",
)  # fmt: skip


def model_identity(config: Any, cache: Any, extra: dict[str, Any]) -> bytes:
    """32 bytes for the whole engine. `cache` is vLLM's KVCacheConfig. Raises InvalidArgument for what cannot
    be shared: hashes that differ in every process, weights that cannot be read."""
    parallel = config.parallel_config
    (group,) = cache.kv_cache_groups
    fields = {
        "version": VERSION,
        "vllm": vllm.__version__,
        "weights": weights_digest(config, extra).hex(),
        "model_version": str(extra.get("model_version", "")),
        "draft": draft_digest(config, extra),
        **engine_fields(config),
        "layout": str(cache.kv_cache_layout or config.cache_config.kv_cache_layout),
        "block_tokens": group.kv_cache_spec.block_size,
        "page_bytes": group.kv_cache_spec.page_size_bytes,
        "layers": list(group.layer_names),
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "prefill_context": parallel.prefill_context_parallel_size,
        "decode_context": parallel.decode_context_parallel_size,
    }
    return hashlib.sha256(_canonical(fields)).digest()


def engine_fields(config: Any) -> dict[str, Any]:
    """What shapes an engine's KV and its hashes, apart from its weights and from how the KV lies. Raises
    InvalidArgument for hashes that say nothing of a request's media, and for a model that cannot begin behind
    a prefix."""
    model = config.model_config
    _check_media_are_digested(config)
    _check_prefixes_can_be_loaded(model)
    return {
        "config": hashlib.sha256(_canonical(_without_places(model.hf_config.to_dict()))).hexdigest(),
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), plain("quantization_config", model.quantization_config)],
        "classes": plain("model_class_overrides", model.model_class_overrides),
        "length": _length(model),
        "media": _media(model.multimodal_config),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "skipped_layers": sorted(config.cache_config.kv_cache_dtype_skip_layers),
        "attention": plain("attention_config", config.attention_config),
        "contexts": _contexts(config.parallel_config),
        "adapters": None if config.lora_config is None else str(config.lora_config.lora_dtype),
        "environment": envs.compile_factors(),  # less what vLLM itself says to be without effect
        "device": _device(str(config.device_config.device_type)),
        "hash": [_hash_algorithm(config), os.environ.get("PYTHONHASHSEED", "")],
    }


def _contexts(parallel: Any) -> int | None:
    """In pieces of how many tokens a block is spread over ranks, where it is."""
    return parallel.cp_kv_cache_interleave_size if parallel.decode_context_parallel_size > 1 else None


def _device(kind: str) -> list[str]:
    """By what vLLM chooses a backend of attention; on a CPU also how K lies in a block (for AMX in pairs)."""
    if kind != "cpu":
        return [kind, str(current_platform.get_device_capability())]
    features = [torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()]
    return [kind, platform.machine(), *map(str, features)]


def _length(model: Any) -> list[Any] | None:
    """What decides how positions are computed, of a model where the longest request does."""
    if not _kinds(model.hf_config.to_dict()).intersection(LENGTH_COUNTS):
        return None
    return [model.max_model_len, plain("override_generation_config", model.override_generation_config)]


def _kinds(value: Any) -> set[str]:
    """All that a configuration calls a kind of something."""
    if isinstance(value, dict):
        found = {str(value[name]) for name in ("rope_type", "type", "model_type") if name in value}
        return found.union(*map(_kinds, value.values()))
    return set().union(*map(_kinds, value)) if isinstance(value, list) else set()


def _media(config: Any) -> dict[str, Any] | None:
    """How media become embeddings, apart from what a request says of it, which is in vLLM's hashes."""
    return None if config is None else counted(fields_of(config) or vars(config), QUIET_OF_MEDIA)


def _check_media_are_digested(config: Any) -> None:
    """Without caches of its own vLLM names media by counting them: the first that an engine sees is called as
    the first of any other."""
    media = config.model_config.multimodal_config
    if media is None or media.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching:
        return
    raise InvalidArgument(
        "mm_processor_cache_gb=0 without prefix caching: vLLM gives media no digest then, only a number; "
        "leave one of the two on"
    )


def _check_prefixes_can_be_loaded(model: Any) -> None:
    """An answer pooled from all tokens at once: vLLM leaves its own prefix cache off for those, but not the
    connectors, and ends at the first request of which a part was loaded."""
    if (pooling := model.pooler_config) is not None and not model.is_prefix_caching_supported:
        kinds = pooling.seq_pooling_type, pooling.tok_pooling_type
        raise InvalidArgument(
            f"pooling {' and '.join(str(kind) for kind in kinds if kind)}: the answer needs the whole prompt "
            "in one step, and nothing of it can be loaded"
        )


def weights_digest(config: Any, extra: dict[str, Any]) -> bytes:
    """As the configuration says it, or of the checkpoint's bytes. Raises InvalidArgument where there are no
    weights to digest.
    """
    if not extra.get("weights_digest") and str(config.load_config.load_format) == "dummy":
        raise InvalidArgument(
            'load_format="dummy" has no weights to tell apart; say "weights_digest" yourself'
        )
    model = config.model_config
    return digest_of_model(model.model, model.revision, extra, config.load_config.download_dir)


def digest_of_model(
    name: str, revision: str | None, extra: dict[str, Any], download_dir: str | None = None
) -> bytes:
    """Of the weights that vLLM knows under that name, in its download_dir where it has one: another cache may
    have the same name's weights of another day. Raises InvalidArgument if they are not here."""
    if digest := extra.get("weights_digest"):
        return hashlib.sha256(b"given\0" + str(digest).encode()).digest()
    try:
        return checkpoint_digest(located(name, revision, download_dir))
    except InvalidArgument as error:
        raise InvalidArgument(f'{error}; say "weights_digest" in the configuration') from error


def draft_digest(config: Any, extra: dict[str, Any]) -> list[Any] | None:
    """Of what guesses tokens, whose KV may lie beside the model's: how, and its weights; those are left out
    where the configuration says the weights' digest. Raises InvalidArgument."""
    if (guessing := config.speculative_config) is None:
        return None
    told = [str(guessing.method), str(guessing.quantization), str(guessing.kv_cache_dtype)]
    draft, model = guessing.draft_model_config, config.model_config
    if draft is None or draft.model == model.model or extra.get("weights_digest"):
        return told
    weights = digest_of_model(draft.model, draft.revision, extra, config.load_config.download_dir)
    return [*told, weights.hex()]


def _hash_algorithm(config: Any) -> str:
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm not in REPRODUCIBLE_HASHES and "PYTHONHASHSEED" not in os.environ:
        known = ", ".join(REPRODUCIBLE_HASHES)
        raise InvalidArgument(
            f"block hashes of {algorithm} differ in every process; use --prefix-caching-hash-algo with one "
            f"of {known}, or set PYTHONHASHSEED to one value for all engines"
        )
    return algorithm


def _without_places(value: Any) -> Any:
    """A configuration without where it was read from, which another host's has elsewhere."""
    if isinstance(value, dict):
        return {name: _without_places(part) for name, part in value.items() if name not in PLACES}
    return [_without_places(part) for part in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":")).encode()


def anew(identity: bytes) -> bytes:
    """An identity that nobody else has, behind one that is over."""
    return hashlib.sha256(identity + os.urandom(32)).digest()


class RequestKeys:
    """The store's keys of one request's blocks, 32 bytes each in one piece, made as vLLM's hashes come. vLLM
    may take hashes back: a request that gets more input loses the token that it had sampled last."""

    def __init__(self, identity: bytes, request: Any, hashes_per_block: int, adapters: Adapters) -> None:
        self._request, self._per_block = request, hashes_per_block
        if (adapter := getattr(request, "lora_request", None)) is not None:
            identity = hashlib.sha256(identity + adapters.digest(adapter)).digest()
        self._derived = DerivedKeys(identity)
        self._made, self._last = b"", b""  # and vLLM's hash behind the last of them

    def hashes(self, start: int, stop: int) -> list[bytes]:
        """vLLM's own, of those blocks."""
        per_block = self._per_block
        return self._request.block_hashes[(start + 1) * per_block - 1 : stop * per_block : per_block]

    def between(self, start: int, stop: int) -> bytes:
        """Of those full blocks, as far as they are known."""
        hashes, per_block = self._request.block_hashes, self._per_block
        full, made = len(hashes) // per_block, len(self._made) // KEY_BYTES
        if made and (full < made or hashes[made * per_block - 1] != self._last):
            self._made, made = b"", 0
        if full > made:
            last_of_each = slice((made + 1) * per_block - 1, full * per_block, per_block)
            self._made += self._derived.packed(hashes[last_of_each])
            self._last = hashes[full * per_block - 1]
        return self._made[start * KEY_BYTES : max(start, stop) * KEY_BYTES]


def of_rank(keys: bytes, rank: int, ranks: int) -> bytes:
    """Each worker stores its own part of a block. `keys`, before and after, in one piece."""
    return keys if ranks == 1 else _derived_of(rank).packed(keys)


def each_of_rank(keys: list[bytes], rank: int, ranks: int) -> list[bytes]:
    """The keys under which a rank stores its share of these blocks; the same where there is one rank."""
    return keys if ranks == 1 else _derived_of(rank).listed(keys)


@cache
def _derived_of(rank: int) -> DerivedKeys:
    return DerivedKeys(rank.to_bytes(KEY_BYTES, "little"))
