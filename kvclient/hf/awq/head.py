"""The head of a packed model, in 16 bits as the checkpoint has it: few rows meet it by native/cpu.

Owns the choice between that and torch, whose product of one row reads such a matrix at a third of the rate
that memory has. Never changes the weights. Invariant: a piece of the matrix gives the bits that the whole
gives there.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kvclient.hf.attention.backends import ENVIRONMENT
from kvclient.hf.awq.linear import cpu_kernels
from kvclient.kernels import linear

ROWS = 8  # of more, torch's product is the faster one
TYPES = (torch.bfloat16, torch.float16)


class Head(torch.nn.Linear):
    """In the place of an nn.Linear, of the same weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] times the weights."""
        return multiply(x, self.weight, self.bias)


def give(model: Any) -> None:
    """The model's head, if it is a stock Linear in 16 bits, becomes such a one."""
    stock = model.get_output_embeddings()
    if type(stock) is not torch.nn.Linear or stock.weight.dtype not in TYPES:
        return
    made = Head(stock.in_features, stock.out_features, stock.bias is not None, device="meta")
    made.weight, made.bias = stock.weight, stock.bias
    model.set_output_embeddings(made.train(stock.training))


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., inputs] times weight [outputs, inputs], as torch.nn.functional.linear."""
    trained = bias is not None and torch.is_grad_enabled() and bias.requires_grad
    if trained or not _fits(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.detach().resolve_neg().reshape(-1, x.shape[-1]).float().contiguous().numpy()
    bits = weight.detach()
    if weight.dtype == torch.bfloat16:
        held = bits.view(torch.int16).numpy().view("uint16")
    else:
        held = bits.numpy()
    out = torch.from_numpy(linear.multiply_halves(rows, held, torch.get_num_threads()))
    out = out if bias is None else out + bias.detach().float()
    return out.to(x.dtype).reshape(*x.shape[:-1], len(weight))


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether native/cpu takes these: few rows in 16 bits, where they lie, and nothing to be traced."""
    return (
        x.dtype == weight.dtype
        and x.dtype in TYPES
        and x.device.type == weight.device.type == "cpu"
        and 0 < x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= ROWS * x.shape[-1]
        and weight.is_contiguous()
        and not weight.is_meta
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and os.environ.get(ENVIRONMENT) != "torch"
        and cpu_kernels()
    )
