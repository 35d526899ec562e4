"""vLLM engines one after the other in one process, each of which differs from the first in one thing: run
with the engines' Python.

    python -m tests.engines.vllm.vllm_identity_scene WAY DIRECTORY MODEL OTHER_MODEL

WAY is "connector" or "spec". Asserts for itself. The first engine fills the store; one like it must hit, any
other must miss, and the first's like must still hit at the end.
"""

import gc
import os
import sys

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.engines.vllm import small_kv

WAY, DIRECTORY, MODEL, OTHER = sys.argv[1:]
PROMPT = [(7 * i + 3) % 500 for i in range(200)]
FULL_BLOCKS = 192  # tokens of it in whole blocks of 32 and of 64


def transfer(store):
    if WAY == "connector":
        return {
            "kv_connector": "KvstoredConnector", "kv_connector_module_path": "kvclient.integrations.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": store,
        }  # fmt: skip
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "KvstoredOffloadingSpec", "spec_module_path": "kvclient.integrations.vllm",
            "offload_prompt_only": False, "kvstored": store},
    }  # fmt: skip


def cached(store=None, salt=None, seed=None, prompt=PROMPT, **engine):
    """Of an engine that differs so: the tokens that it found."""
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    options = {"model": MODEL, "dtype": "float32", "block_size": 32, **engine}
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, kv_cache_memory_bytes=32 << 20, max_model_len=512,
        kv_transfer_config=transfer({"dir": DIRECTORY, **(store or {})}), **options,
    )  # fmt: skip
    asked = {"prompt_token_ids": prompt, **({} if salt is None else {"cache_salt": salt})}
    (out,) = llm.generate([asked], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    if WAY == "spec":  # it saves behind the steps
        llm.generate([{"prompt_token_ids": [2, 3, 5]}], SamplingParams(max_tokens=4), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return out.num_cached_tokens


torch.set_num_threads(1)
assert cached() == 0
assert cached() == FULL_BLOCKS, "the same engine"
DIFFERENT = {
    "weights": {"model": OTHER},
    "configuration": {"hf_overrides": {"rope_theta": 5000.0}},
    "dtype": {"dtype": "bfloat16"},
    "KV dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "block size": {"block_size": 64},
    "hash algorithm": {"prefix_caching_hash_algo": "sha256_cbor"},
    "hash seed": {"seed": "7"},
    "salt": {"salt": "tenant"},
    "version": {"store": {"model_version": "2"}},
    "first token": {"prompt": [1, *PROMPT[1:]]},
}
if not small_kv.there():  # the test says so
    del DIFFERENT["KV dtype"]
for name, change in DIFFERENT.items():
    found = cached(**change)
    assert found == 0, name
assert cached() == FULL_BLOCKS, "the same engine, behind all others"
if WAY == "spec":
    try:
        cached(enable_lora=True)
    except Exception as error:
        assert "model_version" in str(error), error
    else:
        raise AssertionError("adapters, of whose content a spec is told nothing, were taken")
print("PASSED", flush=True)
