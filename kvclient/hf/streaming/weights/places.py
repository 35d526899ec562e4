"""A part's tensors in a layer's modules: as they lie in what was read, or copied where a product wants them.

Owns which tensors are copies, how many bytes that makes, and where they lie in a room. Never reads a file.
Invariant: what the plan counts as a copy is what places() copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.awq.packing import mark_panels
from kvclient.hf.streaming.files.index import ALIGNMENT, Part, Stored

Place = tuple[torch.nn.Module, str, torch.Tensor]


class Away(torch.Tensor):
    """A weight that has no memory now (torch's "meta"). Numbers that meet it are an error: torch itself would
    multiply them by what lies in memory that it does not fill.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_is_there, (*args, *kwargs.values()))):
            raise InvalidArgument(
                "a streamed weight has memory only while its layer, embedding or head is called: "
                "call the layer, not a part of it"
            )
        return super().__torch_function__(function, types, args, kwargs)

    def __deepcopy__(self, _memo: Any) -> Away:
        return self  # nothing of it is anybody's


def _is_there(value: Any) -> bool:
    """Whether it is a tensor with numbers, or has one in it."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_there, value))
    return isinstance(value, torch.Tensor) and not isinstance(value, Away) and not value.is_meta


def away(shape: Sequence[int], dtype: torch.dtype, is_parameter: bool = True) -> Away:
    """A weight of that shape without memory."""
    made = torch.Tensor._make_subclass(Away, torch.empty(shape, dtype=dtype, device="meta"))
    if is_parameter:
        made._is_param = True
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
    layer: torch.nn.Module, part: Part, memory: memoryview, dtype: torch.dtype, copied: bool = False,
    room: Room | None = None,
) -> Iterator[Place]:  # fmt: skip
    """Each of the part's tensors with its module and attribute. memory: the part's bytes. copied: all have
    other memory, and what was read can go. room: where copies lie; None: wherever torch puts them.
    """
    for stored in part.tensors:
        owner, _, attribute = stored.name.rpartition(".")
        tensor = _tensor(stored, memory, dtype, copied, room)
        yield layer.get_submodule(owner), attribute, mark_panels(tensor) if stored.panels else tensor


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
    """places() of the part's weights, of the types that they are computed in, while they have no memory."""
    for stored in part.tensors:
        owner, _, attribute = stored.name.rpartition(".")
        module = layer.get_submodule(owner)
        made = away(stored.shape, _kind(stored, dtype), attribute not in module._buffers)
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
