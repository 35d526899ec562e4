"""What must match between two TensorRT-LLM engines that share KV, and the options of both halves.

Owns the list and the environment variable that the options come from, because KvCacheConnectorConfig has no
place for them. Never touches a tensor. Invariant: what differs misses; a request whose KV depends on more
than its tokens and its salt is not shared at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from typing import Any, NamedTuple

from kvclient.errors import InvalidArgument
from kvclient.integrations.arguments import counted, environment, fields_of
from kvclient.integrations.checkpoint import checkpoint_digest, located
from kvclient.integrations.options import with_defaults

VARIABLE = "KVSTORED_TENSORRT_LLM"
VERSION = 3
OPTIONS = {
    "dir": None,  # of the daemon; by default where kvclient.connect() looks
    "namespace": "default",
    "timeout_s": 2.0,  # of one call
    "wait_s": 2.0,  # for blocks that come from disk
    "lease_s": 30.0,  # how long what was promised is kept for its load
    "weights_digest": "",  # instead of reading the checkpoint
}


# What of TorchLlmArgs and of its KvCacheConfig has no effect on KV; all else counts, whatever it is called.
QUIET = (
    # counted by their bytes, or beside
    "model", "revision", "kv_cache_config", "tensor_parallel_size", "pipeline_parallel_size",
    "context_parallel_size", "kv_connector_config",
    # texts and requests
    "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "postprocess_tokenizer_dir",
    "num_postprocess_workers", "reasoning_parser", "stream_interval", "guided_decoding_backend",
    "batched_logits_processor", "max_batch_size", "max_num_tokens", "max_beam_width", "max_input_len",
    "gather_generation_logits", "sampler_type", "sampler_force_async_worker", "disable_overlap_scheduler",
    # how it is watched, placed and scheduled
    "iter_stats_max_iterations", "request_stats_max_iterations", "return_perf_metrics",
    "perf_metrics_max_requests", "enable_iter_perf_stats", "enable_iter_req_stats", "print_iter_log",
    "enable_layerwise_nvtx_marker", "scheduler_config", "batch_wait_timeout_ms", "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio", "mpi_session", "orchestrator_type", "gpus_per_node", "peft_cache_config",
    "cache_transceiver_config", "ray_worker_extension_cls", "ray_placement_config", "enable_sleep",
    "garbage_collection_gen0_threshold", "cuda_graph_config", "trust_remote_code", "checkpoint_loader",
)  # fmt: skip
QUIET_OF_CACHE = (
    "free_gpu_memory_fraction", "max_tokens", "host_cache_size", "onboard_blocks", "enable_block_reuse",
    "enable_partial_reuse", "copy_on_partial_reuse", "cross_kv_cache_fraction", "event_buffer_max_size",
    "secondary_offload_min_priority", "use_uvm", "max_gpu_total_bytes",
    "attention_dp_events_gather_period_ms",
)  # fmt: skip
VARIABLES = ("TRTLLM_", "TLLM_", "FLASHINFER_")
QUIET_VARIABLES = re.compile(r"_(LOG|TEST|TRACE|PROFILE|NVTX|METRICS|TIMEOUT|PORT|DIR|IP|MPI)(_|$)")
DRAFTS = ("speculative_model_dir", "speculative_model")  # of its speculative_config


_names: dict[bytes, str] = {}  # of this process, by identity


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
    cache, arguments = llm_args.kv_cache_config, fields_of(llm_args) or vars(llm_args)
    sizes = [llm_args.tensor_parallel_size, llm_args.pipeline_parallel_size, llm_args.context_parallel_size]
    if getattr(llm_args, "enable_attention_dp", False):
        raise InvalidArgument("attention data parallelism is not supported")
    fields = {
        "version": VERSION,
        "weights": options["weights_digest"] or _digest(llm_args.model, getattr(llm_args, "revision", None)),
        "draft": None if options["weights_digest"] else _draft(getattr(llm_args, "speculative_config", None)),
        "dtype": str(llm_args.dtype),
        "quantization": str(getattr(llm_args, "quant_config", None)),
        "cache_dtype": str(cache.dtype),
        "block_tokens": cache.tokens_per_block,
        "parallel": sizes,
        # how a block's bytes are arranged differs between both
        "engine": getattr(sys.modules.get("tensorrt_llm"), "__version__", None),
        "attention": str(getattr(llm_args, "attn_backend", None)),
        "arguments": counted(arguments, QUIET),
        "cache": counted(fields_of(cache) or vars(cache), QUIET_OF_CACHE),
        "environment": environment(VARIABLES, QUIET_VARIABLES),
    }
    text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
    ranks = sizes[0] * sizes[1] * sizes[2]
    return Common(options, hashlib.sha256(text.encode()).digest(), int(cache.tokens_per_block), ranks)


def _digest(model: Any, revision: str | None = None) -> str:
    return checkpoint_digest(located(str(model), revision)).hex()


def _draft(speculative: Any) -> str | None:
    """Of the model that guesses, whose KV lies beside, if there is one."""
    named = (getattr(speculative, name, None) for name in DRAFTS)
    model = next((name for name in named if name), None)
    return None if model is None else _digest(model)


def engine_name(identity: bytes) -> str:
    """Of the engine in this process, which no other process has; rank 0 has both halves."""
    return _names.setdefault(identity, os.urandom(16).hex())


def of_rank(keys: list[bytes], rank: int) -> list[bytes]:
    """The keys under which a rank stores its share of these blocks."""
    return [hashlib.sha256(key + rank.to_bytes(4, "little")).digest() for key in keys]


def of_request(identity: bytes, salt: str | None) -> bytes:
    """The identity beneath which a request's chain of blocks begins."""
    if salt is None:
        return identity
    return hashlib.sha256(identity + b"salt\0" + salt.encode()).digest()
