"""The shapes of Qwen2.5-7B in bfloat16, 15 GB: for programs that read no packed words on a CPU.

Owns the directory it makes. Never downloads. Every layer has the same numbers, in a file of its own: what is
measured is reads and products. Invariant: a directory without its marker is made anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from bench.install import progress
from bench.streaming import model as packed


def ensure_dense(tokenizer: Path) -> Path:
    """The directory. tokenizer: of a checkpoint whose files are put beside it; programs load it."""
    home = packed.cache() / "qwen2.5-7b-shapes-bf16"
    if (home / ".made").exists():
        _put_tokenizer(tokenizer, home)
        return home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    progress(f"making 15 GB of random weights in {home}")
    dice, names = np.random.default_rng(7), {}
    tensors = _layer(dice)
    for layer in range(packed.LAYERS):
        renamed = {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}
        packed._save(home, f"layer-{layer:02}.safetensors", renamed, names)
    rest = {
        "model.embed_tokens.weight": packed._normal(dice, (packed.VOCABULARY, packed.HIDDEN)),
        "lm_head.weight": packed._normal(dice, (packed.VOCABULARY, packed.HIDDEN)),
        "model.norm.weight": packed._ones(packed.HIDDEN),
    }
    for name, tensor in rest.items():  # a file each: one is read into memory whole
        packed._save(home, f"{name}.safetensors", {name: tensor}, names)
    sizes = {"total_size": sum(file.stat().st_size for file in home.glob("*.safetensors"))}
    index = {"metadata": sizes, "weight_map": names}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {key: value for key, value in packed.CONFIG.items() if key != "quantization_config"}
    (home / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    (home / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 2}))
    _put_tokenizer(tokenizer, home)
    (home / ".made").touch()
    return home


def _put_tokenizer(source: Path, home: Path) -> None:
    for file in source.glob("tokenizer*"):
        shutil.copy(file, home)


def _layer(dice) -> dict:
    found = {f"{name}.weight": packed._ones(packed.HIDDEN) for name in packed.NORMS}
    for name, (inputs, outputs, bias) in packed.LINEARS.items():
        found[f"{name}.weight"] = packed._normal(dice, (outputs, inputs)) * 0.001
        if bias:
            found[f"{name}.bias"] = packed._normal(dice, (outputs,)) * 0.02
    return found
