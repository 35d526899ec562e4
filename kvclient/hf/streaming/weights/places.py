"""A part's tensors in a layer's modules: as they lie in what was read, or copied where a product wants them.

Owns which tensors are copies, how many bytes that makes, where they lie in a room, and that no gradient is
computed by what lies there later. Never reads a file.
Invariant: what the plan counts as a copy is what places() copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.awq.packing import mark_panels
from kvclient.hf.streaming.files.index import ALIGNMENT, Part, Stored

Place = tuple[torch.nn.Module, str, torch.Tensor]
CPU, META = torch.device("cpu"), torch.device("meta")
MOVES = ("to", "cpu")
WRITES = re.compile(r"__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|.*[^_]_")
CHANGE_NOTHING = ("requires_grad_", "detach_")


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        raise InvalidArgument(
            f"backward through {ctx.what}: its weights have memory only while it computes, and others lie "
            "there now; residency='full_resident' keeps them all"
        )


def forward_only(out: Any, what: str) -> Any:
    """What a layer gives whose weights lay in a slot: numbers as they are, of which a backward is an
    InvalidArgument, for it would multiply by what another layer has put there.
    """
    if isinstance(out, torch.Tensor):
        wanted = torch.is_grad_enabled() and out.requires_grad
        return _ForwardOnly.apply(out, what) if wanted else out
    return type(out)(forward_only(each, what) for each in out) if type(out) in (tuple, list) else out


class Away(torch.Tensor):
    """A weight that has no memory now (torch's "meta"). Numbers that meet it are an error: torch itself would
    multiply them by what lies in memory that it does not fill. So is writing into it, which nobody would see.
    It is on the CPU already for whoever moves a model there, or asks where to put tokens or an adapter.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its memory is in its turn, if that is known."""
        found: torch.device = self.__dict__.get("_comes_to", META)
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in MOVES and isinstance(held := args[0], cls):
            device, dtype = _moved(name, *args[1:], **kwargs)
            if device is None or device.type in ("cpu", "meta"):
                return held if dtype in (None, held.dtype) else held.type(dtype)
        if WRITES.fullmatch(name) and name not in CHANGE_NOTHING:
            raise InvalidArgument(f"{name} of a streamed weight; it is the checkpoint's at each call")
        if any(map(_is_there, (*args, *kwargs.values()))):
            raise InvalidArgument(
                "a streamed weight has memory only while its layer, embedding or head is called: "
                "call the layer, not a part of it"
            )
        if name == "__bool__":  # torch answers no, of numbers that are not there
            raise InvalidArgument("a streamed weight has numbers while its layer is called: none to compare")
        found = super().__torch_function__(function, types, args, kwargs)
        if isinstance(found, Away) and args and isinstance(args[0], Away):
            found._comes_to = args[0].device  # a view of it, as detach() gives it, is where it is
        return found

    def __deepcopy__(self, _memo: Any) -> Away:
        return self  # nothing of it is anybody's

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise InvalidArgument("a streamed weight lies in the checkpoint: copy that, none is written anew")


def _moved(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Where to and to which type; None: as it is. Raises TypeError where it is told more."""
    return (CPU, None) if name == "cpu" else torch._C._nn._parse_to(*args, **kwargs)[:2]


def _is_there(value: Any) -> bool:
    """Whether it is a tensor with numbers, or has one in it."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_there, value))
    return isinstance(value, torch.Tensor) and not isinstance(value, Away) and not value.is_meta


def away(
    shape: Sequence[int], dtype: torch.dtype, is_parameter: bool = True, device: torch.device | None = None
) -> Away:
    """A weight of that shape without memory. device: where it has some in its turn."""
    made = torch.Tensor._make_subclass(Away, torch.empty(shape, dtype=dtype, device="meta"))
    if is_parameter:
        made._is_param = True
    if device is not None:
        made._comes_to = device
    return made


class Room:
    """Memory for the copies of one layer after another, without an allocator that may leave holes."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def empty(self) -> None:
        """What lies in it is used no more."""
        self._at = 0

    def take(self, length: int) -> memoryview:
        """So many bytes, aligned as torch aligns."""
        found = self._memory[self._at : self._at + length]
        assert len(found) == length, (len(self._memory), self._at, length)
        self._at += _aligned(length)
        return found


def places(
    where: Iterable[Place], part: Part, memory: memoryview, dtype: torch.dtype, copied: bool = False,
    room: Room | None = None,
) -> Iterator[Place]:  # fmt: skip
    """Each of the part's tensors for its module and attribute. where: of without(); memory: the part's bytes.
    copied: all have other memory, and what was read can go. room: where copies lie; None: wherever torch puts
    them.
    """
    for (module, attribute, _), stored in zip(where, part.tensors, strict=True):
        tensor = _tensor(stored, memory, dtype, copied, room)
        yield module, attribute, mark_panels(tensor) if stored.panels else tensor


def check(where: Iterable[Place], part: Part, dtype: torch.dtype) -> None:
    """Raises InvalidArgument for a place that has not what without() put there, as it was: somebody has
    changed the weight, and that would be lost. dtype: what is computed in.
    """
    for (module, attribute, was), stored in zip(where, part.tensors, strict=True):
        held = module._buffers.get(attribute, module._parameters.get(attribute))
        kind = _kind(stored, dtype)
        if held is not was or was.dtype != kind or was.shape != torch.Size(stored.shape):
            raise changed(stored.name, held, kind)


def changed(name: str, held: torch.Tensor | None, kind: torch.dtype) -> InvalidArgument:
    """Of a streamed weight, any shape, in whose place that is held now; kind: what it is computed in."""
    now = "nothing" if held is None else f"{held.dtype}{list(held.shape)}"
    return InvalidArgument(
        f"{name} was changed, {now} is in its place; a streamed weight is the checkpoint's at each call, in "
        f"{kind} by from_pretrained(dtype=)"
    )


def put(places: Iterable[Place]) -> None:
    """Each tensor, of its parameter's shape, in its module's place, as a buffer or a parameter."""
    for module, attribute, tensor in places:
        if attribute in module._buffers:
            module._buffers[attribute] = tensor
        elif isinstance(tensor, Away):
            module._parameters[attribute] = tensor
        else:
            module._parameters[attribute] = torch.nn.Parameter(tensor, requires_grad=False)


def without(layer: torch.nn.Module, part: Part, dtype: torch.dtype) -> Iterator[Place]:
    """The part's weights, of the types that they are computed in, while they have no memory, each with its
    module and attribute.
    """
    for stored in part.tensors:
        owner, _, attribute = stored.name.rpartition(".")
        module = layer.get_submodule(owner)
        made = away(stored.shape, _kind(stored, dtype), attribute not in module._buffers, CPU)
        yield module, attribute, made


def copies(part: Part, dtype: torch.dtype, copied: bool = False) -> int:
    """Bytes of the tensors that do not stay in what was read, as they lie in a room."""
    return sum(
        _aligned(math.prod(stored.shape) * _kind(stored, dtype).itemsize)
        for stored in part.tensors
        if copied or _is_copied(stored, dtype)
    )


def lies(part: Part, dtype: torch.dtype, copied: bool = False) -> bool:
    """Whether a tensor of a part that stays in memory lies in what was read."""
    return any(stored.length and not (copied or _is_copied(stored, dtype)) for stored in part.tensors)


def kept(part: Part, dtype: torch.dtype, copied: bool = False) -> int:
    """Bytes of a part that stays in memory: its copies, and what was read if a tensor lies in it."""
    return copies(part, dtype, copied) + (part.length if lies(part, dtype, copied) else 0)


def _kind(stored: Stored, dtype: torch.dtype) -> torch.dtype:
    """What it is computed in; packed words and their scales are read as they lie."""
    written: torch.dtype = getattr(torch, stored.dtype)
    computed = written.is_floating_point and stored.name.rpartition(".")[2] != "scales"
    return dtype if computed else written


def _is_copied(stored: Stored, dtype: torch.dtype) -> bool:
    return stored.unaligned or _kind(stored, dtype) != getattr(torch, stored.dtype)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _tensor(
    stored: Stored, memory: memoryview, dtype: torch.dtype, copied: bool, room: Room | None
) -> torch.Tensor:
    written, kind = getattr(torch, stored.dtype), _kind(stored, dtype)
    if not stored.length:
        return torch.empty(stored.shape, dtype=written)
    found = torch.frombuffer(memory, dtype=torch.uint8, count=stored.length, offset=stored.offset)
    if room is not None and _is_copied(stored, dtype):
        length = math.prod(stored.shape) * kind.itemsize
        made = torch.frombuffer(room.take(length), dtype=kind).view(stored.shape)
        if written == kind:
            made.view(-1).view(torch.uint8).copy_(found)
            return made
        return made.copy_(found.view(written).view(stored.shape))
    if (copied or stored.unaligned) and written == kind:
        found = found.clone()
    return found.view(written).view(stored.shape).to(kind)
