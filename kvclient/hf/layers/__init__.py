"""A model's linear layers, norms, gated MLPs, attentions and decoder layers in fp32 and bf16 on the CPU,
computed by native/cpu.

    kvclient.hf.layers.install(model)

A token has the same numbers whatever tokens stand beside it, which torch's products do not promise; and few
tokens take what reading the weights takes. Weights stay where they are: nothing is packed, copied or kept.
"""

from kvclient.hf.layers.install import install

__all__ = ["install"]
