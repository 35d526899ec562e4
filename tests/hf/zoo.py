"""Tiny random models of many architectures, for tests of kvclient.hf; no weights are fetched.

Owns the configurations. Invariant: every model has enough spread in its weights (initializer_range 0.15) that
another KV gives other tokens; with the default a zeroed KV passes for a right one.
"""

# ruff: noqa: C408, E501
from __future__ import annotations

import pytest
import torch
import transformers

from kvclient.hf.release import cache_of

VOCAB = 320
_SIZES = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, initializer_range=0.15, max_position_embeddings=512,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_MLA = dict(
    num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
)  # fmt: skip
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

# name -> (configuration class, model class, what differs from _SIZES)
SERVED = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=16)),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(head_dim=16, **_MOE)),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=None)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(sliding_window=None, num_local_experts=4)),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", dict(head_dim=16)),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=None)),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", dict(head_dim=16)),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", dict(sliding_window=None)),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=48, n_layer=3, n_head=6, n_positions=512)),
    "opt": ("OPTConfig", "OPTForCausalLM", dict(ffn_dim=64, word_embed_proj_dim=48, init_std=0.15)),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", dict(no_rope_layers=[1, 0, 1])),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "falcon_alibi": ("FalconConfig", "FalconForCausalLM", dict(alibi=True)),
    "bloom": ("BloomConfig", "BloomForCausalLM", dict(n_layer=3, n_head=6)),
    "mpt": ("MptConfig", "MptForCausalLM", dict(d_model=48, n_layers=3, n_heads=6, max_seq_len=512, use_cache=True)),
    "llama_yarn": (
        "LlamaConfig", "LlamaForCausalLM",
        dict(rope_parameters=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=128, rope_theta=10000.0)),
    ),
}  # fmt: skip

# Other positions, or none: for the tests of reuse inside a prompt.
MOVED = {
    "gptj": ("GPTJConfig", "GPTJForCausalLM", dict(n_embd=48, n_layer=3, n_head=6, n_positions=512, rotary_dim=4)),
    "codegen": (
        "CodeGenConfig", "CodeGenForCausalLM",
        dict(num_attention_heads=4, n_positions=512, rotary_dim=4, n_embd=48, n_layer=3, n_head=4),
    ),
    "cohere2_full": ("Cohere2Config", "Cohere2ForCausalLM", dict(layer_types=["full_attention"] * 3)),
    "granite_attention": (
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        dict(layer_types=["attention"] * 3, position_embedding_type=None, num_local_experts=0,
             shared_intermediate_size=64, mamba_n_heads=6, mamba_d_head=16),
    ),
}  # fmt: skip

# Latent attention: what is cached is a latent and a rope key of another width. Prefixes only, and dense.
LATENT = {
    "deepseek_v2": (
        "DeepseekV2Config", "DeepseekV2ForCausalLM",
        dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=32,
             num_experts_per_tok=2, **_MLA),
    ),
    "deepseek_v3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=32,
             num_experts_per_tok=2, **_MLA),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM",
        dict(n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=32, num_experts_per_tok=2,
             mlp_layer_types=["dense", "sparse", "sparse"], **_MLA),
    ),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", _MLA),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", _MLA),
}  # fmt: skip

# Latent attention to what an indexer chooses, by keys of its own. The eight heads leave few ties to choose among.
_INDEXED = dict(
    n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=32, num_experts_per_tok=2,
    mlp_layer_types=["dense", "sparse", "sparse"], index_topk=8, index_head_dim=16, index_n_heads=8,
    **_MLA | dict(head_dim=8),
)  # fmt: skip
INDEXED = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", _INDEXED),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _INDEXED | dict(indexer_types=["full", "shared", "full"]),
    ),
}  # fmt: skip

# A window, and entries that tokens are compressed to: four, or eight, to an entry. Hits end behind eighths.
COMPRESSED = {
    "deepseek_v4": (
        "DeepseekV4Config", "DeepseekV4ForCausalLM",
        dict(head_dim=16, num_key_value_heads=1, q_lora_rank=16, o_groups=2, o_lora_rank=16, hc_mult=2, hc_sinkhorn_iters=2,
             compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8), sliding_window=16,
             layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
             mlp_layer_types=["moe", "moe", "hash_moe"], index_head_dim=16, index_n_heads=8, index_topk=4,
             n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
}  # fmt: skip

# Served as prefixes only: their keys cannot be moved. name -> a word of the reason
UNMOVED = {
    "gpt2": "learned", "opt": "learned",
    **dict.fromkeys(LATENT, "latent|no known rotation"),
}  # fmt: skip

# With layers that see a window of 16 tokens, or a chunk of 16.
WINDOWED = {
    "mistral_sliding": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=16)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(head_dim=16, sliding_window=16)),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(head_dim=16, sliding_window=16)),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", dict(sliding_window=16)),
    "llama4": (
        "Llama4TextConfig", "Llama4ForCausalLM",
        dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=96,
             attention_chunk_size=16, no_rope_layers=[1, 1, 0]),
    ),
    "gpt_oss": (
        "GptOssConfig", "GptOssForCausalLM",
        dict(head_dim=16, sliding_window=16, num_local_experts=4),
    ),
    "qwen2_sliding": (
        "Qwen2Config", "Qwen2ForCausalLM", dict(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    ),
    "phi3_sliding": ("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=16)),
    "starcoder2_sliding": ("Starcoder2Config", "Starcoder2ForCausalLM", dict(sliding_window=16)),
    "mixtral_sliding": ("MixtralConfig", "MixtralForCausalLM", dict(sliding_window=16, num_local_experts=4)),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", dict(sliding_window=16, layer_types=_TYPES)),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", dict(sliding_window=16, layer_types=_TYPES)),
    "smollm3_sliding": (
        "SmolLM3Config", "SmolLM3ForCausalLM",
        dict(use_sliding_window=True, sliding_window=16, no_rope_layers=[1, 0, 1], layer_types=_TYPES),
    ),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", dict(head_dim=16, sliding_window=16)),
    "modernbert_decoder": (
        "ModernBertDecoderConfig", "ModernBertDecoderForCausalLM",
        dict(local_attention=32, num_attention_heads=6, num_key_value_heads=6),
    ),
}  # fmt: skip

_LINEAR = ["linear_attention", "linear_attention", "full_attention"]
# With layers whose state is of all tokens before. Prefixes only, and no padding.
RECURRENT = {
    "qwen3_next": (
        "Qwen3NextConfig", "Qwen3NextForCausalLM",
        dict(head_dim=16, layer_types=_LINEAR, linear_num_key_heads=2, linear_num_value_heads=2,
             linear_key_head_dim=16, linear_value_head_dim=16, shared_expert_intermediate_size=32, **_MOE),
    ),
    "falcon_h1": (
        "FalconH1Config", "FalconH1ForCausalLM",
        dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1,
             mamba_chunk_size=16),
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", dict(state_size=8)),
    "mamba2": (
        "Mamba2Config", "Mamba2ForCausalLM",
        dict(state_size=16, num_heads=6, head_dim=16, expand=2, n_groups=1, chunk_size=16),
    ),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", dict(state_size=8)),
    "jamba": (
        "JambaConfig", "JambaForCausalLM",
        dict(attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4,
             mamba_d_state=8, use_mamba_kernels=False),
    ),
    "bamba": (
        "BambaConfig", "BambaForCausalLM",
        dict(attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1,
             mamba_chunk_size=16),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        dict(layer_types=["mamba", "attention", "mamba"], mamba_n_heads=6, mamba_d_head=16, mamba_d_state=16,
             mamba_n_groups=1, mamba_chunk_size=16, num_local_experts=4, num_experts_per_tok=2,
             shared_intermediate_size=32),
    ),
    "lfm2": (
        "Lfm2Config", "Lfm2ForCausalLM", dict(layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
    ),
    "zamba2": (
        "Zamba2Config", "Zamba2ForCausalLM",
        dict(layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=16, mamba_ngroups=1, n_mamba_heads=6,
             mamba_headdim=16, chunk_size=16, num_mem_blocks=1, adapter_rank=8),
    ),
    "nemotron_h": (
        "NemotronHConfig", "NemotronHForCausalLM",
        dict(hybrid_override_pattern="M*M", mamba_num_heads=6, mamba_head_dim=16, ssm_state_size=16, n_groups=1,
             chunk_size=16, head_dim=16, layers_block_type=["mamba", "attention", "mamba"]),
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig", "OlmoHybridForCausalLM",
        dict(layer_types=_LINEAR, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
             linear_value_head_dim=16),
    ),
    "kimi_linear": (
        "KimiLinearConfig", "KimiLinearForCausalLM",
        dict(layer_types=_LINEAR, linear_head_dim=16, linear_num_heads=2, **_MLA),
    ),
    "minimax": (
        "MiniMaxConfig", "MiniMaxForCausalLM",
        # All its experts: of some, rounding was seen to choose another.
        dict(head_dim=16, block_size=16, num_local_experts=2, num_experts_per_tok=2,
             layer_types=["full_attention", "linear_attention", "full_attention"]),
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM",
        dict(lru_width=48, attention_window_size=16, block_types=["recurrent", "recurrent", "attention"]),
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
        dict(head_dim=16, layer_types=_LINEAR, linear_num_key_heads=2, linear_num_value_heads=2,
             linear_key_head_dim=16, linear_value_head_dim=16),
    ),
}  # fmt: skip

# name -> (…, a word of the reason)
REFUSED = {
    "llama_dynamic": (
        "LlamaConfig", "LlamaForCausalLM",
        dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)), "dynamic",
    ),
}  # fmt: skip


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    seed: int = 0,
    layers: int = 3,
    **changed,
):
    """The model in eval mode, the same in every process for one seed. None if this release does not know it.
    changed: of its configuration.
    """
    config_name, model_name, sizes, *_ = {**SERVED, **MOVED, **LATENT, **INDEXED, **COMPRESSED, **WINDOWED, **RECURRENT, **REFUSED}[name]
    if not hasattr(transformers, model_name):
        return None
    if name == "granite_attention" and not hasattr(transformers.DynamicCache, "has_previous_state"):
        return None  # its own code asks the cache for it: transformers 5.0 cannot run it
    config = getattr(transformers, config_name)(**{**_SIZES, "num_hidden_layers": layers, **sizes, **changed})
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def known(name: str, dtype: torch.dtype = torch.float32, **options):
    """build(), or the test is skipped."""
    model = build(name, dtype, **options)
    if model is None:
        pytest.skip(f"this transformers has no {name}")
    return model


def near(found: torch.Tensor, other: torch.Tensor, bound: float = 1e-5) -> bool:
    return float((found - other).abs().max()) <= bound * float(other.abs().max())


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, length), generator=generator)


def generate(model, ids, new_tokens: int = 8, **options):
    """Greedy tokens and the logits of each, plain or hooked."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    out = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits), cache_of(out)
