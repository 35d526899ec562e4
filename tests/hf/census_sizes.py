"""What the configurations of some types need besides small numbers, to be built tiny (census.py).

Owns these numbers. Where a type's own configuration holds another (a model of text inside one of pictures),
its text part is what is made small, and the vision part as small as it lets itself be made.
"""

# ruff: noqa: C408
from __future__ import annotations

from typing import Any

MLA = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=16, head_dim=8,
)  # fmt: skip
INDEXED = dict(index_topk=8, index_head_dim=16, index_n_heads=8, **MLA)
DECODER = dict(
    encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, is_decoder=True, init_std=0.15, dropout=0.0,
)  # fmt: skip
LINEAR = dict(
    head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    shared_expert_intermediate_size=32,
)  # fmt: skip
WINDOWED = dict(head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
GEMMA4 = dict(
    vocab_size_per_layer_input=320, hidden_size_per_layer_input=16, per_layer_config={}, **WINDOWED
)  # fmt: skip
TEXT = dict(
    vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.15, max_position_embeddings=512,
)  # fmt: skip
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32,
    patch_size=16,
)  # fmt: skip
AUDIO = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_mel_bins=8,
)  # fmt: skip
DOTS3 = dict(
    mlp_layer_types=["dense", "sparse"], layer_types=["indexed_attention", "sliding_attention"],
    sliding_window=16, shared_experts_intermediate_size=32, per_layer_config={},
    **INDEXED | dict(head_dim=16),
)  # fmt: skip
QWEN4 = LINEAR | dict(
    layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=8, indexer_kv_heads=1,
    indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4, hc_count=2, hc_lowrank=16,
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "axk1": dict(mlp_layer_types=["dense", "sparse"], **MLA),
    "axk2": dict(mlp_layer_types=["dense", "sparse"], **INDEXED),
    "bailing_hybrid": dict(
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        linear_head_dim=16, linear_num_heads=2, num_expert_group=1, num_experts_per_token=2, **MLA,
    ),
    "bart": DECODER,
    "bigbird_pegasus": DECODER | dict(attention_type="original_full"),
    "blenderbot": DECODER,
    "blenderbot-small": DECODER,
    "cohere_compass_text": dict(head_dim=16, sliding_window=16, rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=10000.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0))),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2), max_seq_len=512,
    ),
    "deepseek_v32": dict(mlp_layer_types=["dense", "sparse"], **INDEXED),
    "dots3_note": DOTS3,
    "dots3_note_text": DOTS3,
    "gemma3n_text": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=16, laurel_rank=8,
        intermediate_size=[64] * 4, activation_sparsity_pattern=[0.0] * 4, vocab_size_per_layer_input=320,
        **{**WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma4_assistant": GEMMA4 | dict(hidden_size_per_layer_input=0),
    "gemma4_text": GEMMA4,
    "glm_moe_dsa": dict(
        mlp_layer_types=["dense", "sparse"], indexer_types=["full", "full"],
        first_k_dense_replace=1, **INDEXED,
    ),
    "gemma3": dict(text_config=TEXT | WINDOWED, vision_config=VISION),
    "gemma4": dict(text_config=TEXT | GEMMA4, vision_config=None, audio_config=None),
    "gemma4_unified": dict(text_config=TEXT | GEMMA4, vision_config=None, audio_config=None),
    "git": dict(vision_config=VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "gpt_neo": dict(
        attention_types=[[["global", "local"], 1]], hidden_size=48, window_size=16, num_heads=4,
        attention_layers=["global", "local"],
    ),
    "got_ocr2": dict(
        text_config=TEXT,
        vision_config=VISION | dict(mlp_dim=16, output_channels=16, global_attn_indexes=[0]),
    ),
    "helium": dict(head_dim=12),
    "hunyuan_v1_dense": dict(head_dim=12),
    "hunyuan_v1_moe": dict(head_dim=12, moe_topk=2),
    "inkling_text": dict(sliding_window=16),
    "inkling2_text": dict(sliding_window=16),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1, conv_L_cache=3),
    "lfm3": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "sliding_attention"],
                 head_dim=16, sliding_window=16),
    "longcat_flash": dict(
        ffn_hidden_size=64, expert_ffn_hidden_size=32, moe_topk=2, zero_expert_num=2, **MLA
    ),
    "marian": DECODER,
    "mbart": DECODER,
    "moshi": dict(ffn_dim=64, head_dim=12),
    "moss_transcribe_diarize": dict(text_config=TEXT, audio_config=AUDIO),
    "mvp": DECODER,
    "pegasus": DECODER,
    "phi4_multimodal": dict(
        vision_config=VISION,
        audio_config=dict(
            hidden_size=16, intermediate_size=16, num_blocks=1, num_attention_heads=2, input_size=8,
            ext_pw_out_channel=16, depthwise_separable_out_channel=16, nemo_conv_channels=16,
        ),
    ),
    "plbart": DECODER,
    "prophetnet": dict(
        num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
        num_decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, is_decoder=True,
    ),
    "qwen3_5_moe": LINEAR,
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "qwen3_5_moe_text": LINEAR,
    "reformer": dict(
        is_decoder=True, axial_pos_shape=[16, 32], axial_pos_embds_dim=[16, 32], attention_head_size=12,
        feed_forward_size=64, attn_layers=["local", "lsh"], local_attn_chunk_length=16,
        lsh_attn_chunk_length=16, num_buckets=4,
    ),
    "whisper": DECODER | dict(max_target_positions=512, num_mel_bins=8),
    "xlstm": dict(hidden_size=128, num_heads=2, num_blocks=2, chunk_size=16),
    "xmod": dict(is_decoder=True, languages=["en_XX"], default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "hybrid"],
        attention_hidden_size=96, attention_head_dim=24,
        num_key_value_heads=4, n_mamba_heads=2, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "zaya": dict(num_experts_per_tok=1, head_dim=16, router_hidden_size=16),
}  # fmt: skip
SOLE = ("num_hidden_layers",)  # names that some configurations do not take at all
NO_LIMIT = ("max_position_embeddings",)
LACKING: dict[str, tuple[str, ...]] = {"prophetnet": SOLE, "reformer": SOLE, "xlnet": NO_LIMIT}
