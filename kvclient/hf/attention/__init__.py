"""kvclient.hf.attention: the native kernels as attention of a stock transformers model.

    available_backends()          # {"cpu_avx512": None, "cuda": "this build has no CUDA kernels", …}
    install(model)                # any model, without a store; returns the backend's name
    uninstall(model)
    fallbacks()                   # calls that torch answered instead, by reason

Reading order: backends (which there are, which is chosen) → switch (which model has them) → registered (what
transformers calls) → dense (the kernels over tensors) and torch_reference (the same in torch, where the
kernels cannot) → handle (how keys come back to the layer that they are of).
"""

from kvclient.hf.attention.backends import available_backends
from kvclient.hf.attention.registered import fallbacks
from kvclient.hf.attention.switch import backend_of, install, installed, uninstall

__all__ = ["available_backends", "backend_of", "fallbacks", "install", "installed", "uninstall"]
