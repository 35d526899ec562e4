"""The calls into native/cpu that layers are made of, over torch's tensors.

Owns the translation of tensors into the structs of native/kernels.h. Never looks at what it is given: takes()
and its like in forwards.py do. Invariant: what comes out is a new tensor, or what the caller made itself.
"""

from __future__ import annotations

from ctypes import byref, sizeof

import torch

from kvclient.hf.attention import dense
from kvclient.kernels import contract

ROWS = {torch.float32: contract.F32, torch.bfloat16: contract.BF16}
_LINEAR, _NORM, _TURNS = sizeof(contract.Linear), sizeof(contract.Norm), sizeof(contract.Turns)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[..., outputs] of x [..., inputs], which takes_product() said yes to; with up, an MLP's gated half."""
    outputs, inputs = weight.shape
    out = dense.empty(x, (*x.shape[:-1], outputs))
    args = contract.Linear(
        _LINEAR, contract.ABI, inputs, outputs, x.numel() // inputs, ROWS[x.dtype], 0,
        torch.get_num_threads(), x.data_ptr(), weight.data_ptr(), None if up is None else up.data_ptr(),
        None if bias is None else bias.data_ptr(), None if up_bias is None else up_bias.data_ptr(),
        out.data_ptr(), inputs, outputs,
    )  # fmt: skip
    if status := contract.cpu().kvk_linear_multiply(byref(args)):
        contract.check(status)
    return out


def multiply_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rounded: bool
) -> None:
    """out [rows, outputs], whole rows, of x [rows, inputs], all in fp32, which takes_product() said yes to.
    rounded: both factors are, to bf16; sums are fp32.
    """
    (outputs, inputs), rows = weight.shape, x.bfloat16() if rounded else x
    args = contract.Linear(
        _LINEAR, contract.ABI, inputs, outputs, len(x), contract.ROUNDED if rounded else contract.F32, 0,
        torch.get_num_threads(), rows.data_ptr(), weight.data_ptr(), None,
        None if bias is None else bias.data_ptr(), None, out.data_ptr(), inputs, outputs,
    )  # fmt: skip
    if status := contract.cpu().kvk_linear_multiply(byref(args)):
        contract.check(status)


def normalise(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[..., width] of x [..., width], which takes_rows() said yes to, and weight [width]."""
    out, width = dense.empty(x, x.shape), x.shape[-1]
    args = contract.Norm(
        _NORM, contract.ABI, x.numel() // width, width, ROWS[x.dtype], 0, torch.get_num_threads(),
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, width, epsilon,
    )  # fmt: skip
    if status := contract.cpu().kvk_norm_rows(byref(args)):
        contract.check(status)
    return out


def turn(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """In place: query and key [..., heads * head_dim], of which nobody else knows, by cos and sin
    [..., head_dim], a row for each of theirs; all whole, and of one type.
    """
    head_dim = cos.shape[-1]
    heads = (tensor.shape[-1] // head_dim for tensor in (query, key))
    args = contract.Turns(
        _TURNS, contract.ABI, cos.numel() // head_dim, *heads, head_dim, ROWS[cos.dtype], 0,
        torch.get_num_threads(), query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr(),
    )  # fmt: skip
    if status := contract.cpu().kvk_turn_rows(byref(args)):
        contract.check(status)
