"""bfloat16 as NumPy sees it: the element type, and the arrays through which a block is written.

Owns what an assignment to such an array means; never converts what it does not have to. Invariant: numbers
that are assigned arrive rounded, or the assignment is an error: bits are never taken for numbers, nor numbers
for bits. Without ml_dtypes the elements are uint16, the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvclient.errors import InvalidArgument

try:
    from ml_dtypes import bfloat16
except ImportError:
    ELEMENT = np.dtype(np.uint16)
else:
    ELEMENT = np.dtype(bfloat16)

BITS = np.dtype(np.uint16)


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory as a plain array of uint16, if it is of bfloat16, of any shape and unchanged in it; any
    other array as it is.
    """
    return array.view(BITS, np.ndarray) if array.dtype == ELEMENT else array


class Layer(np.ndarray):
    """A layer to be written, bfloat16 or its bits. Takes numbers, or a torch tensor, also one on a device."""

    def __setitem__(self, where: Any, value: Any) -> None:
        """Raises InvalidArgument for numbers where the elements are bits, and for bits where they are not."""
        if hasattr(value, "detach"):
            value = _of_tensor(value)
        if isinstance(value, np.ndarray) and value.dtype == ELEMENT and self.dtype == BITS:
            value = bits(value)
        elif self.dtype != BITS:
            if isinstance(value, np.ndarray) and value.dtype == BITS:
                raise InvalidArgument("an array of uint16 for bfloat16: assign bits to layer.view(np.uint16)")
        elif np.asarray(value).dtype.kind not in "iub":
            raise InvalidArgument(
                f"{np.asarray(value).dtype} for the bits of bfloat16: install ml_dtypes, or assign to "
                "tensor(layer)"
            )
        super().__setitem__(where, value)


def _of_tensor(tensor: Any) -> np.ndarray:
    host = tensor.detach().cpu()
    if str(host.dtype) != "torch.bfloat16":  # (this module does not import torch)
        return host.numpy()
    import torch

    return host.view(torch.int16).numpy().view(ELEMENT)
