"""What must match between two TensorRT-LLM engines that share KV, and the options of both halves.

Owns the list and the environment variable that the options come from, because KvCacheConnectorConfig has no
place for them. Never touches a tensor. Invariant: what differs misses; a request whose KV depends on more
than its tokens and its salt is not shared at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any, NamedTuple

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.integrations.checkpoint import checkpoint_digest
from kvclient.integrations.options import with_defaults

VARIABLE = "KVSTORED_TENSORRT_LLM"
VERSION = 2
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 2.0,  # for blocks that come from disk
    "lease_s": 30.0,  # how long what was promised is kept for its load
    "weights_digest": "",  # instead of reading the checkpoint
}


class Common(NamedTuple):
    options: dict[str, Any]
    identity: bytes
    block_tokens: int
    ranks: int


def common(llm_args: Any) -> Common:
    """Of TensorRT-LLM's TorchLlmArgs. Raises InvalidArgument for what cannot be told apart."""
    try:
        extra = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError as error:
        raise InvalidArgument(f"${VARIABLE} is no JSON: {error}") from None
    options = with_defaults(extra, OPTIONS, f"${VARIABLE}")
    cache = llm_args.kv_cache_config
    sizes = [llm_args.tensor_parallel_size, llm_args.pipeline_parallel_size, llm_args.context_parallel_size]
    if getattr(llm_args, "enable_attention_dp", False):
        raise InvalidArgument("attention data parallelism is not supported")
    fields = {
        "version": VERSION,
        "weights": options["weights_digest"] or checkpoint_digest(str(llm_args.model)).hex(),
        "dtype": str(llm_args.dtype),
        "quantization": str(getattr(llm_args, "quant_config", None)),
        "cache_dtype": str(cache.dtype),
        "block_tokens": cache.tokens_per_block,
        "parallel": sizes,
        # how a block's bytes are arranged differs between both
        "engine": getattr(sys.modules.get("tensorrt_llm"), "__version__", None),
        "attention": str(getattr(llm_args, "attn_backend", None)),
    }
    text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
    ranks = sizes[0] * sizes[1] * sizes[2]
    return Common(options, hashlib.sha256(text.encode()).digest(), int(cache.tokens_per_block), ranks)


def connect(options: dict[str, Any]) -> Any:
    """A client for an engine: what the daemon cannot do is a miss."""
    return kvclient.connect(
        options["dir"],
        options["namespace"],
        on_error="miss",
        timeout_s=float(options["timeout_s"]),
        owner="engine",
    )


def of_rank(keys: list[bytes], rank: int) -> list[bytes]:
    """The keys under which a rank stores its share of these blocks."""
    return [hashlib.sha256(key + rank.to_bytes(4, "little")).digest() for key in keys]


def of_request(identity: bytes, salt: str | None) -> bytes:
    """The identity beneath which a request's chain of blocks begins."""
    if salt is None:
        return identity
    return hashlib.sha256(identity + b"salt\0" + salt.encode()).digest()
