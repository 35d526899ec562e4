"""What the connector cannot keep right ends the start, with the reason: vLLM's own configurations and caches,
no engine and no daemon. Run with the engines' Python.

    python -m tests.engines.vllm.steps.vllm_refusals_scene MODEL

Asserts for itself.
"""

import sys
from dataclasses import replace

import torch
from vllm.config import KVTransferConfig, MultiModalConfig, PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

import kvclient
from kvclient.integrations.vllm.connector import KvstoredConnector
from tests.engines.vllm.vllm_identities import TOKENS, cache_of, config_of, identity_of

MODEL = sys.argv[1]
SHAPE = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def refused(call, words):
    try:
        call()
    except kvclient.InvalidArgument as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


class AnotherScheduler:
    """Of nobody's kind."""


def connector(role, cache=None, split=None, engine=None, **transfer):
    transfer = KVTransferConfig(**{
        "kv_connector": "KvstoredConnector", "kv_connector_module_path": "kvclient.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": "/nowhere"}, **transfer,
    })  # fmt: skip
    config = config_of(MODEL, split=split, kv_transfer_config=transfer, **(engine or {}))
    return KvstoredConnector(config, role, cache or cache_of())


def configurations(role):
    ranks = cache_of()
    ranks.hash_block_size = 2 * TOKENS  # as vLLM has it with several ranks
    split = {"decode_context_parallel_size": 2}
    refused(lambda: connector(role, ranks, split), "spread over 2 ranks")
    refused(lambda: connector(role, split={"enable_dbo": True}), "2 microbatches")
    refused(lambda: connector(role, split={"ubatch_size": 3}), "3 microbatches")
    refused(lambda: connector(role, engine={"scheduler_cls": AnotherScheduler}), "AnotherScheduler")
    refused(lambda: connector(role, kv_load_failure_policy="fail"), 'must be "recompute"')
    refused(lambda: connector(role, kv_connector_extra_config={"dri": "/typo"}), "dri")


def caches(role):
    full = FullAttentionSpec(**SHAPE)

    def of(*specs):
        cache = cache_of()
        groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        return replace(cache, kv_cache_groups=groups)

    for cache, words in (
        (of(full, full), "2 KV cache groups"),
        (of(SlidingWindowSpec(**SHAPE, sliding_window=64)), "SlidingWindowSpec"),
        (of(ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)), "ChunkedLocalAttentionSpec"),
        (of(replace(full, sliding_window=64)), "window or chunks"),
        (of(replace(full, attention_chunk_size=64)), "window or chunks"),
        (of(UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"layer.0": full})), "UniformType"),
    ):
        refused(lambda cache=cache: connector(role, cache), words)


def media():
    """Without caches of its own vLLM digests none: an engine's first picture is called as another's first."""
    counted = {"multimodal_config": MultiModalConfig(mm_processor_cache_gb=0)}
    identity_of(MODEL, fields=counted)
    identity_of(MODEL, fields={"multimodal_config": MultiModalConfig()}, enable_prefix_caching=False)
    refused(lambda: identity_of(MODEL, fields=counted, enable_prefix_caching=False), "mm_processor_cache_gb")


def pooling():
    """vLLM ends at a request of which a part was loaded, where all of it must be computed in one step."""

    def of(**kind):
        return lambda: identity_of(
            MODEL, runner="pooling", convert="embed", pooler_config=PoolerConfig(**kind), dtype="float32"
        )

    refused(of(seq_pooling_type="MEAN"), "MEAN")
    refused(of(seq_pooling_type="CLS"), "CLS")
    assert of(seq_pooling_type="LAST")()


for half in KVConnectorRole:
    configurations(half)
    caches(half)
media()
pooling()
print("PASSED", flush=True)
