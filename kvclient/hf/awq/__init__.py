"""AWQ checkpoints ("gemm" version, 4 bits) straight from safetensors, without any AWQ package.

    model = kvclient.hf.awq.from_pretrained(directory)

On a CUDA device the layers multiply with the kernels of native/cuda; fallbacks() counts the calls there that
torch answered instead, by reason. Never changes a transformers class, never guesses: another version, other
bits or a tensor without a place is an error that names it.
"""

from kvclient.hf.awq.checkpoint import from_pretrained
from kvclient.hf.awq.linear import AwqLinear, fallbacks
from kvclient.hf.awq.packing import from_lanes, pack, quantise, to_lanes, unpack

__all__ = [
    "AwqLinear",
    "fallbacks",
    "from_lanes",
    "from_pretrained",
    "pack",
    "quantise",
    "to_lanes",
    "unpack",
]
