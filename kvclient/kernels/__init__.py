"""The native kernels over plain arrays: quantise, dequantise and rotate KV; attend to it where it lies.

Knows NumPy and no framework; kvclient.hf.attention is the face for torch. The contract is native/kernels.h.
"""

from kvclient.kernels.attention import Call, Segment, attend, prepare, segment
from kvclient.kernels.codec import Quantised, dequantise, empty, quantise, rotate, turn
from kvclient.kernels.contract import NotQuantisable, Unsupported, auto_path, lacks

__all__ = [
    "Call",
    "NotQuantisable",
    "Quantised",
    "Segment",
    "Unsupported",
    "attend",
    "auto_path",
    "dequantise",
    "empty",
    "lacks",
    "prepare",
    "quantise",
    "rotate",
    "segment",
    "turn",
]
