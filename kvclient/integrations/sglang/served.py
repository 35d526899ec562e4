"""What an SGLang engine serves: its weights, and everything else of its arguments, its environment and its
adapters that shapes KV; and whether its weights are still those of the start.

Owns the list of what has no effect; reads SGLang's configuration where the engine's own process published it.
Invariants: an argument or a variable that the list does not know counts; once weights were changed in a
running engine nothing is shared under the name of the old ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.integrations.arguments import counted, environment
from kvclient.integrations.checkpoint import checkpoint_digest, located

CONTEXT = "sglang.srt.runtime_context"  # where an engine's process has its arguments, since SGLang 0.5.2x
WEIGHT_FIELDS = ("model_path", "load_format", "weight_version")  # what an update of weights overrides
# Of SGLang's namespaces those that say how it is reached, watched and scheduled, but for what is named.
QUIET_NAMESPACES = ("observability", "serving", "disagg", "schedule", "memory", "exec.graph", "exec.overlap")
COUNTED_OF_THEM = (
    "weight_version", "c128_page_size", "swa_prefix_tails", "enable_hisparse", "hisparse_config",
    "language_only", "language_model_only", "encoder_only", "enable_page_major_kv_layout",
)  # fmt: skip
QUIET = (
    # the weights count by their bytes, the page by the pool, the split by the ranks
    "model_path", "revision", "download_dir", "tp_size", "pp_size", "dcp_size", "attn_cp_size", "dp_size",
    "attn_dp_size", "enable_dp_attention", "model_checksum",
    # how weights come here, and what is done with them besides
    "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads",
    "weight_loader_drop_cache_after_load", "engine_info_bootstrap_port", "modelopt_checkpoint_save_path",
    "modelopt_export_path", "delete_ckpt_after_loading", "weight_cache_mode", "weight_cache_socket",
    "weight_cache_timeout", "checkpoint_engine_wait_weights_before_ready", "trust_remote_code",
    # devices, processes and addresses
    "base_gpu_id", "gpu_id_step", "random_seed", "watchdog_timeout", "soft_watchdog_timeout", "sleep_on_idle",
    "use_ray", "custom_sigquit_handler", "numa_node", "gc_threshold", "nccl_port", "dist_timeout",
    "dist_init_addr", "gated_launch_port", "nnodes", "node_rank", "pp_max_micro_batch_size",
    "pp_async_batch_depth", "load_balance_method", "enable_p2p_check", "pre_warm_nccl", "mooncake_ib_device",
    "enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup",
    "enable_layerwise_nvtx_marker", "spec_trace_dir", "disable_outlines_disk_cache", "grammar_backend",
    "cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step",
    # of sampling
    "sampling_backend", "sampling_mask_max_tokens", "enable_custom_logit_processor",
    # how many adapters there may be, and when they leave
    "max_loaded_loras", "max_loras_per_batch", "lora_eviction_policy", "enable_lora_overlap_loading",
    "lora_drain_wait_threshold", "lora_strict_loading", "lora_paths",
)  # fmt: skip
VARIABLES = ("SGLANG_", "SGL_", "FLASHINFER_", "USE_TRITON_")
QUIET_VARIABLES = re.compile(
    r"_(LOG|TEST|TRACE|PROFILE|PROFILER|METRICS|TIMEOUT|PORT|SOCKET|ZMQ|GRPC|HEALTH|HEALTHCHECK|WARMUP"
    r"|COREDUMP|CRASH|INTERVAL|DIR|CI|IP|NVTX|HICACHE|BOOTSTRAP)(_|$)"
)


def weights_of(options: dict[str, Any]) -> str:
    """What tells the weights apart: as the configuration says it, or of the files that are served. Raises
    InvalidArgument if nobody says which those are, and where the configuration says others.
    """
    if identity := options["model_identity"]:
        return f"given:{identity}"
    if updates():
        raise InvalidArgument(
            "weights were changed in this engine before it was told of kvstored; say model_identity, a name "
            "of those that it has now"
        )
    path, arguments = options["model_path"], _arguments()
    if arguments is not None:
        cache = arguments.get("download_dir")
        served = located(str(arguments["model_path"]), arguments.get("revision"), cache)
        if path and Path(path).exists() and not Path(path).samefile(served):
            raise InvalidArgument(f"model_path={path}, but SGLang serves {served}")
        path = served
    if path:
        return f"digest:{checkpoint_digest(path).hex()}"
    raise InvalidArgument(
        'SGLang does not tell a storage backend which weights it serves; say "model_path" (their directory, '
        'whose bytes are read once) or "model_identity" (a name that you change whenever the weights change)'
    )


def engine_of(options: dict[str, Any]) -> dict[str, Any]:
    """What else shapes KV. Raises InvalidArgument where the arguments cannot be told apart, or were not found
    and no model_identity answers for them.
    """
    arguments = _arguments()
    if arguments is None:
        if not options["model_identity"]:
            raise InvalidArgument(
                "SGLang's arguments were not found in this process; say model_identity, and change it with "
                "the weights and with every argument that shapes KV"
            )
        return {"environment": environment(VARIABLES, QUIET_VARIABLES)}
    quiet = {name for name, place in _namespaces().items() if place.startswith(QUIET_NAMESPACES)}
    kept = counted(arguments, (quiet - set(COUNTED_OF_THEM)) | set(QUIET))
    for name in ("speculative_draft_model_path", "uno_lora_path"):
        if arguments.get(name) and not options["model_identity"]:
            revision = arguments.get("speculative_draft_model_revision") if "draft" in name else None
            place = located(str(arguments[name]), revision, arguments.get("download_dir"))
            kept[name] = checkpoint_digest(place).hex()
    return {
        "sglang": getattr(sys.modules.get("sglang"), "__version__", None),
        "arguments": kept,
        "adapters": _adapters(arguments.get("lora_paths")),
        "environment": environment(VARIABLES, QUIET_VARIABLES),
    }


def updates() -> int:
    """How often weights were changed in this engine since its start, as far as SGLang notes it: each update
    from disk, and each that has a weight_version.
    """
    if (context := _context()) is None:
        return 0
    return sum(any(name in fields for name in WEIGHT_FIELDS) for _, fields in context.overrides_log())


def _adapters(paths: Any) -> list[list[str]]:
    """Of --lora-paths, whose ids in SGLang's page hashes are made of name and path alone. Those that are
    loaded later have ids of their own, in every engine another."""
    told = []
    if isinstance(paths, Mapping):
        paths = [{"lora_name": name, "lora_path": path} for name, path in paths.items()]
    for adapter in paths or ():
        name, path = _name_and_path(adapter)
        told.append([name, checkpoint_digest(located(path)).hex()])
    return sorted(told)


def _name_and_path(adapter: Any) -> tuple[str, str]:
    if isinstance(adapter, str):
        name, _, path = adapter.partition("=")
        return name, path or name
    if isinstance(adapter, dict):
        return str(adapter["lora_name"]), str(adapter["lora_path"])
    return str(adapter.lora_name), str(adapter.lora_path)


def _context() -> Any | None:
    """SGLang's, if this process has one with arguments."""
    module = sys.modules.get(CONTEXT)  # an engine has imported it; importing it here would make an empty one
    if module is None:
        return None
    context = module.get_context()
    try:
        return None if context.server_args is None else context
    except ValueError:  # nobody published any
        return None


def _arguments() -> dict[str, Any] | None:
    context = _context()
    return None if context is None else dict(context.resolved_server_args_dict())


def _namespaces() -> dict[str, str]:
    """Of each argument; empty where SGLang has none, and then every argument counts."""
    module, context = sys.modules.get("sglang.srt.arg_groups.arg_utils"), _context()
    if module is None or context is None:
        return {}
    return dict(module.namespace_of(type(context.server_args)))
