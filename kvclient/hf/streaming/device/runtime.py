"""What is asked of a device: streams, events with times, memory of both sides.

Owns host memory that the device reads by itself, and gives it back when nobody holds it. Never chooses what
is copied. Invariant: all that a model on a device asks of torch.cuda is asked here; the tests have another
one that does it late (tests/hf/streaming/device).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming.mover import pages
from kvclient.kernels import contract

ALIGNMENT = 512  # of a tensor, as torch's own allocator has it: a product's last bits depend on it
HOST_TYPES = {2: torch.int16, 4: torch.int32}  # of elements, by their size, as they are handed to the device


@dataclass(frozen=True)
class Reading:
    """Bytes. held: now; peak: the most so far; files: of `held`, what the kernel takes back by itself."""

    held: int
    peak: int
    files: int = 0


class Runtime(Protocol):
    """A device. Streams have wait_event(event) and record_event(event), which gives it back."""

    device: torch.device

    def Stream(self) -> Any:
        """A new stream."""

    def stream(self, stream: Any) -> Any:
        """A context in which copies stand in this stream."""

    def current_stream(self) -> Any:
        """That the calling thread computes in."""

    def event(self) -> Any:
        """A new event: query() says whether it has come, a.elapsed_time(b) milliseconds between two."""

    def wait(self, event: Any) -> None:
        """The calling thread waits until it has come."""

    def memory(self, length: int) -> torch.Tensor:
        """uint8 [length bytes] on the device, whose address stays."""

    def kept_for(self, memory: torch.Tensor, stream: Any) -> torch.Tensor:
        """The same, uint8 [bytes], not to be used again before what this stream was asked for is done."""

    def pinned(self, length: int) -> torch.Tensor:
        """uint8 [length bytes] of the host, which the device reads by itself. Raises InvalidArgument."""

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor [any shape] of pinned() as the device sees it: the same memory, read over the link."""

    def free(self) -> int:
        """Bytes of the device that nobody has taken."""

    def reading(self) -> Reading | None:
        """What is held of the device, and the most so far; None: it does not say."""

    def lacks(self) -> str | None:
        """Why there are no AWQ kernels for it; None: there are."""

    def settle(self) -> None:
        """Waits until the device has done all."""


class Cuda:
    """One CUDA device. Raises InvalidArgument where torch sees none."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise InvalidArgument(f"device={str(device)!r}; torch {torch.__version__} sees no CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise InvalidArgument(f"device={str(device)!r}; torch sees {torch.cuda.device_count()} devices")
        self.device = torch.device("cuda", index)

    def Stream(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self.device)

    def stream(self, stream: Any) -> Any:
        """torch's context."""
        return torch.cuda.stream(stream)

    def current_stream(self) -> Any:
        """Of the calling thread."""
        return torch.cuda.current_stream(self.device)

    def event(self) -> Any:
        """One that has a time."""
        return torch.cuda.Event(enable_timing=True)

    def wait(self, event: Any) -> None:
        """Without the interpreter."""
        event.synchronize()

    def memory(self, length: int) -> torch.Tensor:
        """uint8 [length bytes] by torch's allocator. Raises torch.OutOfMemoryError."""
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def kept_for(self, memory: torch.Tensor, stream: Any) -> torch.Tensor:
        """uint8 [bytes], as torch's allocator keeps it."""
        memory.record_stream(stream)
        return memory

    def pinned(self, length: int) -> torch.Tensor:
        """uint8 [length bytes], pages of this process, registered: torch's own pinned memory is a power of
        two long. Raises InvalidArgument with what the system refuses.
        """
        memory = pages(max(1, length))
        found = torch.frombuffer(memory, dtype=torch.uint8)
        runtime, address = torch.cuda.cudart(), found.data_ptr()
        with torch.cuda.device(self.device):
            status = int(runtime.cudaHostRegister(address, found.numel(), 0))
        if status:
            raise InvalidArgument(
                f"the system pins no {length} bytes of the host's memory for the device (CUDA error {status})"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
        return found

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor [its shape] by its address, which is the same on both sides."""
        kind = HOST_TYPES[tensor.dtype.itemsize]
        return torch.as_tensor(_Seen(tensor, kind), device=self.device).view(tensor.dtype)

    def free(self) -> int:
        """As the driver says, and what torch keeps for its next tensors."""
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + held

    def reading(self) -> Reading:
        """As torch's allocator counts."""
        held = torch.cuda.memory_allocated(self.device)
        return Reading(held, torch.cuda.max_memory_allocated(self.device))

    def lacks(self) -> str | None:
        """As the kernels' library says."""
        return contract.cuda_lacks(self.device.index)

    def settle(self) -> None:
        """Of all streams."""
        torch.cuda.synchronize(self.device)


class _Seen:
    """What __cuda_array_interface__ wants to know of a tensor; keeps it alive."""

    def __init__(self, tensor: torch.Tensor, kind: torch.dtype) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": f"<i{kind.itemsize}", "version": 2, "strides": None,
            "data": (tensor.data_ptr(), False),
        }  # fmt: skip
