"""A checkpoint with the shapes of Qwen2.5-7B and random weights, packed in AWQ: made once, 5.6 GB on disk.

Owns the directory it makes, and its GGUF twin (Q4_0, the same shapes) for llama.cpp. Never downloads. The
bytes and products are those of the real one; the answer to a token is the next of its round of 32, for the
layers add little and the head has the embedding's rows turned by one. Invariant: a directory without its
marker is made anew.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np

from bench.install import progress

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCABULARY, GROUP = 3584, 18944, 28, 28, 4, 152_064, 128
HEAD_DIM, ROUND = HIDDEN // HEADS, 32
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN, True),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM, True),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM, True),
    "self_attn.o_proj": (HIDDEN, HIDDEN, False),
    "mlp.gate_proj": (HIDDEN, FFN, False),
    "mlp.up_proj": (HIDDEN, FFN, False),
    "mlp.down_proj": (FFN, HIDDEN, False),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 2, "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True
    },
}  # fmt: skip


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvstored" / "bench-streaming"


def ensure(tokenizer: Path | None = None) -> Path:
    """The directory. tokenizer: of a model whose files are put beside it, so that texts can be asked."""
    home = cache() / "qwen2.5-7b-shapes"
    if (home / ".made").exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    progress(f"making 5.6 GB of random weights in {home}")
    dice, names = np.random.default_rng(7), {}
    for layer in range(LAYERS):
        _save(home, f"layer-{layer:02}.safetensors", _layer(dice, f"model.layers.{layer}"), names)
    embedding = _normal(dice, (VOCABULARY, HIDDEN))
    rest = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.view(-1, ROUND, HIDDEN).roll(1, 1).reshape(VOCABULARY, HIDDEN),
        "model.norm.weight": _ones(HIDDEN),
    }
    _save(home, "rest.safetensors", rest, names)
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (home / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer is not None:
        for file in tokenizer.glob("*token*"):
            shutil.copy(file, home)
    (home / ".made").touch()
    return home


def _layer(dice, prefix: str) -> dict:
    found = {f"{prefix}.{name}.weight": _ones(HIDDEN) for name in NORMS}
    for name, (inputs, outputs, bias) in LINEARS.items():
        module = f"{prefix}.{name}"
        found[f"{module}.qweight"] = dice.integers(-(1 << 31), 1 << 31, (inputs, outputs // 8), np.int32)
        found[f"{module}.qzeros"] = np.full((inputs // GROUP, outputs // 8), 0x77777777, np.int32)
        scales = dice.uniform(1e-4, 2e-4, (inputs // GROUP, outputs))
        found[f"{module}.scales"] = scales.astype(np.float16)
        if bias:
            found[f"{module}.bias"] = _normal(dice, (outputs,)) * 0.02
    return found


def _normal(dice, shape: tuple[int, ...]):
    """bfloat16: the upper half of float32's bits."""
    import torch

    bits = dice.standard_normal(shape, np.float32).view(np.uint32) >> 16
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def _ones(count: int):
    import torch

    return torch.ones(count, dtype=torch.bfloat16)


def _save(home: Path, file: str, tensors: dict, names: dict[str, str]) -> None:
    import torch
    from safetensors.torch import save_file

    made = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in tensors.items()
    }
    save_file(made, home / file, metadata={"format": "pt"})
    names.update(dict.fromkeys(made, file))


def ensure_gguf() -> Path:
    """The same shapes as llama.cpp reads them: Q4_0 in every matrix, 4.0 GB."""
    import gguf

    path = cache() / "qwen2.5-7b-shapes-q4_0.gguf"
    if path.exists():
        return path
    progress(f"making {path}")
    dice, part = np.random.default_rng(7), path.with_suffix(".part")
    out = gguf.GGUFWriter(part, "qwen2", use_temp_file=False)
    out.add_block_count(LAYERS)
    out.add_context_length(2048)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1000000.0)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    words = [f"<{i}>" for i in range(VOCABULARY)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(words)
    out.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    out.add_token_merges(["< 0"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(2)
    ours = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down"}  # fmt: skip
    tensors: list[tuple[str, tuple[int, ...], bool]] = [
        ("token_embd.weight", (VOCABULARY, HIDDEN), True), ("output.weight", (VOCABULARY, HIDDEN), True),
        ("output_norm.weight", (HIDDEN,), False),
    ]  # fmt: skip
    for layer in range(LAYERS):
        tensors += [(f"blk.{layer}.{name}.weight", (HIDDEN,), False) for name in ("attn_norm", "ffn_norm")]
        for name, (inputs, outputs, bias) in LINEARS.items():
            tensors.append((f"blk.{layer}.{ours[name]}.weight", (outputs, inputs), True))
            if bias:
                tensors.append((f"blk.{layer}.{ours[name]}.bias", (outputs,), False))
    for name, shape, packed in tensors:
        held = (shape[0], shape[1] // 32 * 18) if packed else shape
        kind, size = (np.uint8, math.prod(held)) if packed else (np.float32, 4 * math.prod(held))
        raw = gguf.GGMLQuantizationType.Q4_0 if packed else None
        out.add_tensor_info(name, held, np.dtype(kind), size, raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for _, shape, packed in tensors:
        out.write_tensor_data(_q4_0(dice, shape) if packed else np.ones(shape, np.float32))
    out.close()
    os.replace(part, path)
    return path


def _q4_0(dice, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 32 weights: a scale in fp16 and 16 bytes of codes."""
    rows, columns = shape
    data = dice.integers(0, 256, (rows, columns // 32, 18), np.uint8)
    scales = np.float16(0.003)
    data[..., :2] = np.frombuffer(scales.tobytes(), np.uint8)
    return data.reshape(rows, columns // 32 * 18)
