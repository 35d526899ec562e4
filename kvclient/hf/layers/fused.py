"""A decoder layer of few rows in two calls into native/cpu, one before its attention and one behind it.

Owns the structs of those calls, and what they were made of: each tensor, and where it lay. Never computes
from one that is another now, or lies elsewhere. Invariant: the numbers are those of the single calls, to the
bit; a struct serves one call at a time.
"""

from __future__ import annotations

import contextlib
import threading
from ctypes import byref, sizeof
from typing import Any

import torch

from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.awq.packing import in_panels
from kvclient.hf.awq.spinning import stand_for
from kvclient.hf.layers.attention import NORMS, PARTS, Attends
from kvclient.hf.layers.calls import ROWS as DTYPES
from kvclient.hf.layers.forwards import is_plain, takes_product
from kvclient.kernels import awq, contract

ROWS = awq.ROWS  # of a layer, at most
FREE = 4  # structs that are kept for the next calls
_IN, _OUT = sizeof(contract.LayerIn), sizeof(contract.LayerOut)
_local = threading.local()


class Sealed:
    """Tensors as they were found: under which name, and where their numbers lie."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[str, Any], str, Any, int, Any, Any]] = []

    def add(self, held: dict[str, Any], name: str) -> Any:
        """The tensor of that name, or None where there is none."""
        tensor = held.get(name)
        if tensor is None:
            self._found.append((held, name, None, 0, None, None))
        else:
            self._found.append((held, name, tensor, tensor.data_ptr(), tensor.shape, tensor.dtype))
        return tensor

    def stands(self) -> bool:
        """Whether all are there still, as they were, and no gradient of one is wanted."""
        for held, name, was, place, shape, dtype in self._found:
            tensor = held.get(name)
            if tensor is not was:
                return False
            if tensor is not None and (
                tensor.data_ptr() != place
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                return False
        return not torch.is_grad_enabled() or not any(
            found[2] is not None and found[2].requires_grad for found in self._found
        )


def is_packed(module: Any) -> bool:
    """Whether it is a layer of packed words, whose forward is its class's."""
    return type(module) is AwqLinear and "forward" not in module.__dict__


class Fused:
    """The two calls of a layer [batch, tokens, hidden] whose modules are the known ones."""

    def __init__(self, module: Any, attends: Attends) -> None:
        self._module, self._attends = module, attends
        self._sealed: Sealed | None = None
        self._made_for: tuple[torch.dtype, int] | None = None
        self._made: dict[str, Any] = {}
        self._free: list[tuple[Any, Any, Sealed | None]] = []

    def stands(self, dtype: torch.dtype) -> bool:
        """Whether it can compute rows of that type; made anew where a tensor is another since."""
        made_for = dtype, self._attends.module.head_dim
        if self._sealed is not None and self._made_for == made_for and self._sealed.stands():
            return True
        sealed = Sealed()
        made = self._weights(sealed, dtype)
        self._sealed, self._free = None, []
        if made is None or not sealed.stands():
            return False
        self._sealed, self._made_for, self._made = sealed, made_for, made
        return True

    def _weights(self, sealed: Sealed, dtype: torch.dtype) -> dict[str, Any] | None:
        """By the names of the structs' fields; None: one of them is not for the kernels."""
        module, attention, mlp = self._module, self._attends.module, self._module.mlp
        products = [getattr(attention, name) for name in PARTS]
        products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        names = ("query", "key", "value", "out", "gate", "up", "down")
        made: dict[str, Any] = {}
        for name, product in zip(names, products, strict=True):
            made[name] = (_packed if is_packed(product) else _plain)(product, sealed, dtype)
        norms = {"first": module.input_layernorm, "second": module.post_attention_layernorm}
        if self._attends.kind.norms:
            norms |= {name: getattr(attention, name) for name in NORMS}
        hidden = made["query"] and made["query"].inputs
        for name, norm in norms.items():
            weight = sealed.add(norm._parameters, "weight")
            width = attention.head_dim if name in NORMS else hidden
            fits = is_plain(weight) and weight.dtype is dtype and weight.shape == (width,)
            made[name] = weight.data_ptr() if fits else None
        return made if all(value is not None for value in made.values()) and self._fit(made) else None

    def _fit(self, made: dict[str, Any]) -> bool:
        """Whether rows go from one product to the next."""
        hidden, heads = made["query"].inputs, self._attends.module.head_dim
        same = made["key"].inputs == made["value"].inputs == made["gate"].inputs == hidden
        ends = made["out"].outputs == made["down"].outputs == hidden
        wide = made["gate"].outputs == made["up"].outputs == made["down"].inputs
        sides = made["key"].outputs == made["value"].outputs and made["up"].inputs == hidden
        whole = not any(made[name].outputs % heads for name in ("query", "key"))
        alike = (made["gate"].group == 0) == (made["up"].group == 0)
        return same and ends and wide and sides and whole and alike

    def take(self) -> tuple[Any, Any, Sealed | None]:
        """Structs that no other call has until give()."""
        with contextlib.suppress(IndexError):  # another thread may take the last
            return self._free.pop()
        assert self._made_for is not None
        made, sealed, (dtype, heads) = self._made, self._sealed, self._made_for
        kind = DTYPES[dtype]
        before = contract.LayerIn(_IN, contract.ABI, 0, heads, kind)
        behind = contract.LayerOut(_OUT, contract.ABI, 0, kind)
        before.query, before.key, before.value = made["query"], made["key"], made["value"]
        behind.out, behind.gate = made["out"], made["gate"]
        behind.up, behind.down = made["up"], made["down"]
        before.norm, behind.norm = made["first"], made["second"]
        before.query_norm, before.key_norm = made.get("q_norm"), made.get("k_norm")
        return before, behind, sealed

    def give(self, structs: tuple[Any, Any, Sealed | None]) -> None:
        """Back what take() gave, unless they are of tensors that have changed since."""
        if structs[2] is self._sealed and len(self._free) < FREE:
            self._free.append(structs)

    def heads(self, before: Any, hidden: torch.Tensor, angles: Any, rows: int) -> list[torch.Tensor]:
        """Queries, keys and values [batch, tokens, heads, head_dim] of hidden, turned by cos and sin, which
        are whole rows for each of its, or by nothing.
        """
        attention, heads = self._attends.module, self._attends.module.head_dim
        shape = hidden.shape[:2]
        out = [hidden.new_empty((*shape, side.outputs // heads, heads))
               for side in (before.query, before.key, before.value)]  # fmt: skip
        before.rows, before.threads = rows, torch.get_num_threads()
        before.epsilon = self._module.input_layernorm.variance_epsilon
        if self._attends.kind.norms:
            before.query_epsilon = attention.q_norm.variance_epsilon
            before.key_epsilon = attention.k_norm.variance_epsilon
        before.x = hidden.data_ptr()
        before.cos, before.sin = (None, None) if angles is None else [each.data_ptr() for each in angles]
        before.q, before.k, before.v = out[0].data_ptr(), out[1].data_ptr(), out[2].data_ptr()
        library = contract.cpu()
        _run(before, library.kvk_layer_before, library.kvk_layer_in_workspace)
        return out

    def rest(
        self, behind: Any, hidden: torch.Tensor, attended: torch.Tensor, factor: float, rows: int
    ) -> torch.Tensor:
        """What the layer answers, [batch, tokens, hidden], of what attended to hidden's rows."""
        middle, result = torch.empty_like(hidden), torch.empty_like(hidden)
        behind.rows, behind.threads = rows, torch.get_num_threads()
        behind.epsilon, behind.factor = self._module.post_attention_layernorm.variance_epsilon, factor
        behind.attended, behind.residual = attended.data_ptr(), hidden.data_ptr()
        behind.middle, behind.result = middle.data_ptr(), result.data_ptr()
        library = contract.cpu()
        _run(behind, library.kvk_layer_behind, library.kvk_layer_out_workspace)
        return result


def _run(args: Any, call: Any, workspace: Any) -> None:
    """With this thread's workspace, which grows to what the largest call wanted."""
    args.workspace, args.workspace_bytes = getattr(_local, "memory", (None, 0))
    status = call(byref(args))
    if status == contract.WORKSPACE:
        size = workspace(byref(args))
        _local.tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        args.workspace, args.workspace_bytes = _local.memory = (_local.tensor.data_ptr(), size)
        status = call(byref(args))
    if status != contract.OK:
        contract.check(status)


def _plain(module: Any, sealed: Sealed, dtype: torch.dtype) -> Any:
    weight, bias = sealed.add(module._parameters, "weight"), sealed.add(module._parameters, "bias")
    if weight is None or weight.ndim != 2 or not is_plain(weight) or weight.dtype is not dtype:
        return None
    with torch.no_grad():
        if not takes_product(weight[:1], weight, bias):
            return None
    outputs, inputs = weight.shape
    added = None if bias is None else bias.data_ptr()
    return contract.Weights(inputs, outputs, 0, 0, weight.data_ptr(), added)


def _packed(module: Any, sealed: Sealed, dtype: torch.dtype) -> Any:
    held = module._buffers
    words, zeros, scales = (sealed.add(held, name) for name in ("qweight", "qzeros", "scales"))
    bias = sealed.add(module._parameters, "bias")
    if module._in_lanes or any(tensor is None for tensor in (words, zeros, scales)):
        return None
    if bias is not None and not (is_plain(bias) and bias.dtype is torch.float32 is dtype):
        return None
    module._check_held(words, zeros, scales, bias)
    stand_for(torch.get_num_threads())
    places = (words, bias, zeros, scales)
    return contract.Weights(
        module.in_features, module.out_features, module.group, int(in_panels(words)),
        *(None if tensor is None else tensor.data_ptr() for tensor in places),
    )  # fmt: skip
