"""What docs/engines.md tells a vLLM user to copy, given to vLLM: run with the engines' Python.

    python -m tests.engines.vllm.vllm_documented_scene DIRECTORY MODEL

Asserts for itself. The connector's and the spec's engine each fill the store and hit in a second engine. The
tier, which a CPU cannot run, goes as far as vLLM's own choice of a tier's class.
"""

import gc
import json
import sys

import torch
from vllm import LLM, EngineArgs, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvclient.integrations.vllm import KvstoredTier
from tests.engines.documented import arguments

DIRECTORY, MODEL = sys.argv[1:]
PROMPT = [(7 * i + 3) % 500 for i in range(200)]
SMALL = (
    "--skip-tokenizer-init --enforce-eager --dtype float32 --block-size 32 --max-model-len 512 "
    "--kv-cache-memory-bytes 33554432"
)


def cached(transfer):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    said = parser.parse_args(["--model", MODEL, *SMALL.split(), "--kv-transfer-config", json.dumps(transfer)])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(said))
    (out,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=4), use_tqdm=False)
    llm.generate([{"prompt_token_ids": [2, 3, 5]}], SamplingParams(max_tokens=4), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return out.num_cached_tokens


torch.set_num_threads(1)
connector, spec, tier = arguments("--kv-transfer-config", **{"/run/kvstored": DIRECTORY})
for transfer in (connector, spec):
    assert (cached(transfer), cached(transfer)) == (0, 192), transfer
(lower,) = tier["kv_connector_extra_config"]["secondary_tiers"]
assert SecondaryTierFactory.get_tier_class(lower) is KvstoredTier
print("PASSED", flush=True)
