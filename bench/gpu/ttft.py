"""Time to the first token of a model on a GPU, its prefix in a daemon's memory. A row of bench.gpu.

Owns the model, of Llama 3 8B's shape with random weights in bf16, and the daemon. Contenders alternate, wall
time, medians: plain generate(); cold, which computes and publishes; warm, which finds the prefix in the
daemon's memory, and the same from int8 blocks; floor, plain generate() over the exact KV in device memory.
Invariant: what is called a token was brought to the host.
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import torch

from bench.gpu import clock as gpu_clock
from bench.reuse_ttft import TAIL_TOKENS, Contenders, daemon

TOKENS, ROUNDS, MEMORY, BLOCK = (4096, 32_768), 3, "40GiB", 128
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
}  # fmt: skip


def random_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(gpu_clock.DEVICE):
        return LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).eval()


def ttft(_ceilings: dict[str, float]) -> dict[str, Any]:
    import kvclient

    model = random_model()
    with daemon(MEMORY) as home, kvclient.connect(dir=home) as client:
        twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        exact, quantised = Contenders(model, client), Contenders(twin, client, codec="int8")
        return {f"{tokens} tokens": measured(exact, quantised, tokens) for tokens in TOKENS}


def measured(exact: Contenders, quantised: Contenders, tokens: int) -> dict[str, Any]:
    told = torch.randint(SHAPE["vocab_size"], (1, tokens + TAIL_TOKENS), device=gpu_clock.DEVICE)
    for contender in (exact, quantised):
        contender.stored(told)
    layers = exact.prefix_of(told, tokens)
    calls = {
        "plain": lambda: exact.hf(told),
        "cold": lambda: exact.stored(torch.randint_like(told, SHAPE["vocab_size"])),
        "warm": lambda: exact.stored(told),
        "warm int8": lambda: quantised.stored(told),
        "floor": lambda: exact.floor(told, layers),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            _, wall, _ = call()
            if number:
                taken[name].append(wall)
    found = {name: {"us": median(walls) * 1e6} for name, walls in taken.items()}
    exact.stored(told)
    return {**found, "backend": {str(exact.kv.backend): {"reused": exact.kv.last.reused_tokens}}}
