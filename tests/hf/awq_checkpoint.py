"""A packer: writes an AWQ "gemm" checkpoint of any model, for tests.

Owns the files of one directory. Never looks at activations: codes are the nearest ones. Invariant: the model
that was given then holds, in ordinary linear layers, exactly what the checkpoint's words stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from kvclient.hf import awq

QUANTISATION = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}


def tiny_llama(layers: int = 5) -> transformers.LlamaForCausalLM:
    """Random, the same each time, with tokens that differ from each other."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def write_checkpoint(
    home: Path, model: torch.nn.Module, group: int, quantisation: dict[str, Any] | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> Path:  # fmt: skip
    """All linear layers but lm_head. quantisation, change: what is to be wrong about it."""
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            words = dict(
                zip(("qweight", "qzeros", "scales"), awq.quantise(module.weight, group), strict=True)
            )
            del tensors[f"{name}.weight"]
            tensors.update({f"{name}.{part}": value for part, value in words.items()})
            twin = awq.AwqLinear(module.in_features, module.out_features, group, False, module.weight.dtype)
            twin.load_state_dict(words)
            with torch.no_grad():
                module.weight.copy_(twin.weights(0, module.out_features, module.weight.dtype).t())
    if change is not None:
        change(tensors)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(
        {name: value.clone().contiguous() for name, value in tensors.items()}, home / "model.safetensors"
    )
    said = QUANTISATION | {"group_size": group} | (quantisation or {})
    dtype = str(model.dtype).removeprefix("torch.")
    config = model.config.to_dict() | {"quantization_config": said, "dtype": dtype}
    (home / "config.json").write_text(json.dumps(config, default=str))
    model.generation_config.save_pretrained(home)
    return home
