"""A draft model for the made 7B: the shapes of Qwen2.5-0.5B, random and packed, 730 MB, in memory only.

Owns the model it makes. Never reads or writes a file. Invariant: it answers as the 7B does, the next token of
the round of 32, but for one token in WRONG: what a draft costs is that model's, how often it is right is set.
"""

from __future__ import annotations

from bench.streaming.model import CONFIG, GROUP, ROUND, VOCABULARY

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, WRONG = 896, 4864, 24, 14, 2, 4


def draft_model():
    import torch
    import transformers

    from kvclient.hf.awq.linear import AwqLinear

    shape = {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
    }  # fmt: skip
    whole = {name: value for name, value in CONFIG.items() if name != "quantization_config"}
    config = transformers.Qwen2Config(**{**whole, **shape})
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    dice = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(block, name, _packed(AwqLinear, linear, dice))
    embedding = torch.randn((VOCABULARY, HIDDEN), generator=dice, dtype=torch.bfloat16)
    head = embedding.view(-1, ROUND, HIDDEN).roll(1, 1)
    head[:, ::WRONG] = 0  # these are never answered
    model.model.embed_tokens.weight = torch.nn.Parameter(embedding, requires_grad=False)
    model.lm_head.weight = torch.nn.Parameter(head.reshape(VOCABULARY, HIDDEN), requires_grad=False)
    for name, weight in list(model.named_parameters()):
        if weight.is_meta:  # norms
            owner, _, attribute = name.rpartition(".")
            ones = torch.ones(weight.shape, dtype=torch.bfloat16)
            setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(ones, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def size(model) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def _packed(kind, linear, dice):
    import torch

    found = kind(linear.in_features, linear.out_features, GROUP, linear.bias is not None, torch.bfloat16)
    found.qweight.random_(-(1 << 31), (1 << 31) - 1, generator=dice)
    found.qzeros.fill_(0x77777777)
    found.scales.fill_(1.5e-4)
    return found
