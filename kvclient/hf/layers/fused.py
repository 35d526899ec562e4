"""A decoder layer of few rows in two calls into native/cpu, one before its attention and one behind it.

Owns the structs of those calls, and what they were made of: each tensor, and where it lay. Never computes
from one that is another now, or lies elsewhere. Invariant: the numbers are those of the single calls, to the
bit; a struct serves one call at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from ctypes import byref, sizeof
from dataclasses import dataclass
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
SIDES = ("query", "key", "value")
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


@dataclass
class Structs:
    """Of one call at a time. wide: biases of packed layers of bf16 as the words want them, by name."""

    before: Any
    behind: Any
    wide: dict[str, torch.Tensor]


class Calls:
    """What the structs of a layer's two calls say for rows of one type, and which tensors that is of. Never
    changes: where one of those is another now, others are made.
    """

    def __init__(
        self, sealed: Sealed, dtype: torch.dtype, heads: int, weights: dict[str, Any],
        narrow: dict[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """heads: the size of one; weights: by the names of the structs' fields; narrow: biases in bf16 of
        packed layers, by the same.
        """
        self.dtype, self.heads, self._sealed = dtype, heads, sealed
        self._weights, self._narrow = weights, narrow
        self._free: list[Structs] = []

    def biases(self, structs: Structs) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What structs of take() read as biases, [outputs], and what that is a copy of, in another type."""
        return [(structs.wide[name], bias) for name, bias in self._narrow.items()]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of rows, and of queries, keys and values; alike in layers that take turns."""
        query, key, value = (self._weights[name] for name in SIDES)
        return query.inputs, query.outputs, key.outputs, value.outputs

    def stand(self) -> bool:
        """Whether all tensors are there still, as they were."""
        return self._sealed.stands()

    def take(self) -> Structs:
        """Structs that no other call has until give(); never to give them back is no harm."""
        structs = None
        with contextlib.suppress(IndexError):  # another thread may take the last
            structs = self._free.pop()
        structs = self._made() if structs is None else structs
        for name, bias in self._narrow.items():  # each time: somebody may have written into it
            structs.wide[name] = wide = bias.detach().float()
            getattr(structs.before if name in SIDES else structs.behind, name).bias = wide.data_ptr()
        return structs

    def _made(self) -> Structs:
        made, kind = self._weights, DTYPES[self.dtype]
        before = contract.LayerIn(_IN, contract.ABI, 0, self.heads, kind)
        behind = contract.LayerOut(_OUT, contract.ABI, 0, kind)
        before.query, before.key, before.value = made["query"], made["key"], made["value"]
        behind.out, behind.gate = made["out"], made["gate"]
        behind.up, behind.down = made["up"], made["down"]
        before.norm, behind.norm = made["first"], made["second"]
        before.query_norm, before.key_norm = made.get("q_norm"), made.get("k_norm")
        return Structs(before, behind, {})

    def give(self, structs: Structs) -> None:
        """Back what take() gave."""
        if len(self._free) < FREE:
            self._free.append(structs)


class Fused:
    """The two calls of a layer [batch, tokens, hidden] whose modules are the known ones."""

    def __init__(self, module: Any, attends: Attends) -> None:
        self._module, self._attends = module, attends
        self._latest: Calls | None = None  # other threads may have others

    def calls(self, dtype: torch.dtype) -> Calls | None:
        """For rows of that type, made anew where a tensor is another since; None: it cannot compute them."""
        found, heads = self._latest, self._attends.module.head_dim
        if found is not None and found.dtype is dtype and found.heads == heads and found.stand():
            return found
        sealed, narrow = Sealed(), dict[str, torch.Tensor]()
        made = self._weights(sealed, narrow, dtype)
        found = Calls(sealed, dtype, heads, made, narrow) if made is not None and sealed.stands() else None
        self._latest = found
        return found

    def _weights(
        self, sealed: Sealed, narrow: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, Any] | None:
        """By the names of the structs' fields; None: one of them is not for the kernels."""
        module, attention, mlp = self._module, self._attends.module, self._module.mlp
        products = [getattr(attention, name) for name in PARTS]
        products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        made: dict[str, Any] = {}
        for name, product in zip((*SIDES, "out", "gate", "up", "down"), products, strict=True):
            if not is_packed(product):
                made[name] = _plain(product, sealed, dtype)
                continue
            made[name] = _packed(product, sealed, dtype)
            if product.bias is not None and dtype is not torch.float32:
                narrow[name] = product.bias
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

    def heads(self, before: Any, hidden: torch.Tensor, angles: Any, rows: int) -> list[torch.Tensor]:
        """Queries, keys and values [batch, tokens, heads, head_dim] of hidden, turned by cos and sin, which
        are whole rows for each of its, or by nothing.
        """
        heads, shape = self._attends.module.head_dim, hidden.shape[:2]
        out = [hidden.new_empty((*shape, side.outputs // heads, heads))
               for side in (before.query, before.key, before.value)]  # fmt: skip
        before.rows, before.x = rows, hidden.data_ptr()
        before.cos, before.sin = (None, None) if angles is None else [each.data_ptr() for each in angles]
        before.q, before.k, before.v = out[0].data_ptr(), out[1].data_ptr(), out[2].data_ptr()
        self.run_before(before, torch.get_num_threads())
        return out

    def run_before(self, before: Any, threads: int) -> None:
        """The first call, of a struct that has its places and rows."""
        before.threads = threads
        self.told(before)
        library = contract.cpu()
        _run(before, library.kvk_layer_before, library.kvk_layer_in_workspace)

    def told(self, before: Any = None, behind: Any = None) -> None:
        """Tells the structs what the modules say now of their norms."""
        if behind is not None:
            behind.epsilon = self._module.post_attention_layernorm.variance_epsilon
        if before is None:
            return
        before.epsilon = self._module.input_layernorm.variance_epsilon
        if self._attends.kind.norms:
            attention = self._attends.module
            before.query_epsilon = attention.q_norm.variance_epsilon
            before.key_epsilon = attention.k_norm.variance_epsilon

    def rest(
        self, behind: Any, hidden: torch.Tensor, attended: torch.Tensor, factor: float, rows: int
    ) -> torch.Tensor:
        """What the layer answers, [batch, tokens, hidden], of what attended to hidden's rows."""
        middle, result = torch.empty_like(hidden), torch.empty_like(hidden)
        behind.rows, behind.factor = rows, factor
        behind.attended, behind.residual = attended.data_ptr(), hidden.data_ptr()
        behind.middle, behind.result = middle.data_ptr(), result.data_ptr()
        self.run_behind(behind, torch.get_num_threads())
        return result

    def run_behind(self, behind: Any, threads: int) -> None:
        """The second call, of a struct that has its places, rows and factor."""
        behind.threads = threads
        self.told(None, behind)
        library = contract.cpu()
        _run(behind, library.kvk_layer_behind, library.kvk_layer_out_workspace)


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
    if bias is not None and not (is_plain(bias) and bias.dtype is dtype and len(bias) == module.out_features):
        return None
    wide = bias if dtype is torch.float32 else None  # of bf16 each call has its own (Calls.take)
    module._check_held(words, zeros, scales, wide)
    stand_for(torch.get_num_threads())
    places = (words, wide, zeros, scales)
    return contract.Weights(
        module.in_features, module.out_features, module.group, int(in_panels(words)),
        *(None if tensor is None else tensor.data_ptr() for tensor in places),
    )  # fmt: skip


def lay(
    before: contract.LayerIn, behind: contract.LayerOut, number: int, rows: int,
    turns: Sequence[torch.Tensor], asks: torch.Tensor, sides: torch.Tensor, out: torch.Tensor,
    flow: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Where layer `number` of a step of so many rows computes. turns: cos and sin [rows, 1, head_dim]; asks,
    out: [rows, 1, heads, head_dim]; sides: K and V [2, ...]; flow: [rows, 1, hidden] each, what goes from
    layer to layer, from one to the other and back, and what lies between a layer's halves.
    """
    before.rows = behind.rows = rows
    before.cos, before.sin = (turn.data_ptr() for turn in turns)
    before.q = asks.data_ptr()
    before.k, before.v = sides[0].data_ptr(), sides[1].data_ptr()
    behind.attended, behind.factor, behind.middle = out.data_ptr(), 1.0, flow[2].data_ptr()
    before.x = behind.residual = flow[number % 2].data_ptr()
    behind.result = flow[1 - number % 2].data_ptr()
