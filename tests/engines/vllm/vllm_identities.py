"""What identities of vLLM's engines are made of, for vllm_keys_scene.py: configurations of vLLM's own that
differ in one thing, and models of which one file does. Runs with the engines' Python.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvclient.integrations.vllm.identity import model_identity

TOKENS = 32


def config_of(model, fields=None, split=None, device=None, **engine):
    """`fields`: what is set in the model's configuration behind vLLM's own checks, as `split` in that of its
    ranks and `device` are."""
    config = EngineArgs(
        model=model, skip_tokenizer_init=True, enforce_eager=True, **{"dtype": "float32", **engine}
    ).create_engine_config()
    for part, changes in ((config.model_config, fields), (config.parallel_config, split)):
        for name, value in (changes or {}).items():
            setattr(part, name, value)
    config.device_config.device_type = device or config.device_config.device_type
    return config


def cache_of(layers=2, block=TOKENS, layout="LBHNC", blocks=8):
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = KVCacheGroupSpec([f"layer.{i}" for i in range(layers)], spec)
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout=layout
    )  # fmt: skip


def identity_of(model, layers=2, block=TOKENS, layout="LBHNC", extra=None, **config):
    """32 bytes."""
    return model_identity(config_of(model, **config), cache_of(layers, block, layout), extra or {})


def copy_of_model(model: str, target: Path, change):
    shutil.copytree(model, target)
    change(target)
    return str(target)


def other_weight(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def other_config(path):
    file = path / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def long_positions(path):
    """As Phi-3's: other factors where the longest request is longer than those it was trained with."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 2048, **factors}
    file.write_text(json.dumps({**config, "rope_scaling": rope, "rope_parameters": rope}))


@contextlib.contextmanager
def variable(name, value):
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
