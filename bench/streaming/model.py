"""A checkpoint with the shapes of Qwen2.5-7B and random weights, packed in AWQ: made once, 5.6 GB on disk.
`python -m bench.streaming.model` makes it and prints its directory.

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
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.install import ROOT, progress

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


@dataclass(frozen=True)
class Shapes:
    """Of a model that llama.cpp reads. kind: its name there. tied: the head has the embedding's rows."""

    name: str
    kind: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    bias: bool
    tied: bool


QWEN = Shapes(
    "qwen2.5-7b-shapes", "qwen2", HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCABULARY, bias=True, tied=False
)
SMOLLM2 = Shapes("smollm2-135m-shapes", "llama", 576, 1536, 30, 9, 3, 49_152, bias=False, tied=True)


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


def ensure_gguf(of: Shapes | None = None) -> Path:
    """These shapes as llama.cpp reads them, random: Q4_0 in every matrix. Default: those above, 4.0 GB."""
    import gguf

    of = of or QWEN
    path = cache() / f"{of.name}-q4_0.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    progress(f"making {path}")
    dice, part = np.random.default_rng(7), path.with_suffix(".part")
    out = gguf.GGUFWriter(part, of.kind, use_temp_file=False)
    out.add_block_count(of.layers)
    out.add_context_length(2048)
    out.add_embedding_length(of.hidden)
    out.add_feed_forward_length(of.ffn)
    out.add_head_count(of.heads)
    out.add_head_count_kv(of.kv_heads)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1000000.0)
    out.add_rope_dimension_count(of.hidden // of.heads)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    words = [f"<{i}>" for i in range(of.vocabulary)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(words)
    out.add_token_types([gguf.TokenType.NORMAL] * of.vocabulary)
    out.add_token_merges(["< 0"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(2)
    tensors = list(_tensors(of))
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


def _tensors(of: Shapes) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether it is packed, as GGUF has them."""
    yield "token_embd.weight", (of.vocabulary, of.hidden), True
    if not of.tied:
        yield "output.weight", (of.vocabulary, of.hidden), True
    yield "output_norm.weight", (of.hidden,), False
    narrow = of.hidden // of.heads * of.kv_heads
    matrices = {
        "attn_q": (of.hidden, of.hidden, of.bias), "attn_k": (narrow, of.hidden, of.bias),
        "attn_v": (narrow, of.hidden, of.bias), "attn_output": (of.hidden, of.hidden, False),
        "ffn_gate": (of.ffn, of.hidden, False), "ffn_up": (of.ffn, of.hidden, False),
        "ffn_down": (of.hidden, of.ffn, False),
    }  # fmt: skip
    for layer in range(of.layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (of.hidden,), False
        for name, (outputs, inputs, bias) in matrices.items():
            yield f"blk.{layer}.{name}.weight", (outputs, inputs), True
            if bias:
                yield f"blk.{layer}.{name}.bias", (outputs,), False


def _q4_0(dice, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 32 weights: a scale in fp16 and 16 bytes of codes."""
    rows, columns = shape
    data = dice.integers(0, 256, (rows, columns // 32, 18), np.uint8)
    scales = np.float16(0.003)
    data[..., :2] = np.frombuffer(scales.tobytes(), np.uint8)
    return data.reshape(rows, columns // 32 * 18)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    import model as example_model

    print(ensure(example_model.ensure()))
