"""Proves that Engine serves a model from a .gguf file as from a directory: the same tokens, and reuse.

Method: the tiny random llama of the zoo, written as GGUF with names and rows in that format's order, by hand;
how often its words are read is counted.
"""

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from kvclient.hf import Engine
from tests.hf.zoo import build, generate

gguf = pytest.importorskip("gguf")  # of the extra "model"

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_A_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def interleaved(rows, heads):
    """GGUF turns pairs of neighbours, transformers the two halves of a head."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def path(model, tmp_path):
    config, path = model.config, tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<bos>", "<eos>", *alphabet, alphabet[0] + alphabet[1]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *(f"<{i}>" for i in range(len(tokens), config.vocab_size))])
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(2)
    for name, values in model.state_dict().items():
        name, values = name.removesuffix(".weight"), values.numpy()
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                values = interleaved(values, len(values) // config.head_dim)
            name = f"blk.{layer}.{OF_A_LAYER[part]}"
        else:
            name = WHOLE[name]
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_served(path, model, client):
    text, options = "The store keeps what was computed.", {"block_tokens": 16, "self_test": False}
    with Engine.from_pretrained(path, client, dtype=torch.float32, **options) as engine:
        ids = engine.encode(text)
        wanted, _, _ = generate(model, torch.tensor([ids]), 8)
        cold, warm = engine.generate(text, 8), engine.generate(text, 8)
        assert engine.tokenizer.decode(ids) == text and len(ids) == len(text)
    assert cold.tokens == warm.tokens == wanted[0, len(ids) :].tolist()
    assert (cold.report.reused_tokens, warm.report.reused_tokens) == (0, 32)


def test_its_words_are_read_once(path, client, monkeypatch):
    """Three times, for configuration, tokenizer and weights, they were; and nothing stays changed."""
    before, read = gguf.GGUFReader, []

    class Counted(before):
        def _build_fields(self, *args):
            read.append(type(self.data))
            return super()._build_fields(*args)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    with Engine.from_pretrained(path, client, dtype=torch.float32, self_test=False):
        assert read == [np.ndarray], "views of a mapped file are slow"
    assert gguf.GGUFReader is Counted
