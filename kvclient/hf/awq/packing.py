"""Four bit codes in words: the order of a checkpoint (AutoAWQ's "gemm") and those of the kernels: lanes for
a GPU, panels for a CPU.

Owns packing, unpacking and quantising. Never runs a kernel. Invariant: from_lanes(to_lanes(w)) is w, and so
for panels; which words lie in panels is said by their shape, which stays whoever copies, sends or moves them:
[1, inputs, outputs / 8].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvclient.errors import InvalidArgument
from kvclient.kernels.awq import PANELS_INPUTS, PANELS_WORDS

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4
LEVELS = 15
LARGEST_SCALE = 65504.0  # of fp16
LANES_INPUTS, LANES_OUTPUTS = 64, 16  # of a tile of the kernels' order


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n / 8] to uint8 [rows, n], the columns in order."""
    shifts = torch.arange(0, 32, BITS, device=words.device, dtype=torch.int32)
    nibbles = (words[:, :, None] >> shifts) & LEVELS
    places = torch.tensor(ORDER, device=words.device).argsort()
    return nibbles[:, :, places].reshape(words.shape[0], -1).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of unpack(): integers 0..15 [rows, n] to int32 [rows, n / 8]."""
    nibbles = codes.reshape(codes.shape[0], -1, 8)[:, :, list(ORDER)].to(torch.int64)
    words = (nibbles << torch.arange(0, 32, BITS, device=codes.device)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantise(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qweight, qzeros, scales) of a linear layer's weight [out, in], to nearest, in groups of its inputs.

    Raises InvalidArgument for a shape without such words, and for weights that fp16 scales cannot hold.
    """
    _check_shape(weight.shape[1], weight.shape[0], group)
    rows = weight.t().float().reshape(-1, group, weight.shape[0])  # [groups, group, out]
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    steps = ((high - low) / LEVELS).clamp(min=1e-6)
    if not bool((steps <= LARGEST_SCALE).all()):  # nor is a NaN
        wrong = float(steps[~(steps <= LARGEST_SCALE)][0])
        raise InvalidArgument(f"weights that need a scale of {wrong:g}; fp16 holds {LARGEST_SCALE:g} at most")
    scales = steps.to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(0, LEVELS)
    codes = (rows / scales.float()[:, None] + zeros[:, None]).round().clamp(0, LEVELS)
    return pack(codes.reshape(-1, weight.shape[0])), pack(zeros), scales


def _check_shape(inputs: int, outputs: int, group: int) -> None:
    if group < 1 or inputs % group or outputs % 8:
        raise InvalidArgument(f"[{inputs}, {outputs}] fits no groups of {group} and words of 8 columns")


def to_lanes(words: torch.Tensor) -> torch.Tensor:
    """A checkpoint's words in the order the kernels read (native/cuda/awq_tile.h), in the same shape."""
    codes = unpack(words)
    inputs, outputs = codes.shape
    # Input 64a + 16t + 4s + 2h + e, output 16b + 8i + g: word [b, a, lane 4g + t, s], nibble 4e + 2h + i.
    parts = codes.reshape(inputs // LANES_INPUTS, 4, 4, 2, 2, outputs // LANES_OUTPUTS, 2, 8)
    nibbles = parts.permute(5, 0, 7, 1, 2, 4, 3, 6).reshape(-1, 8).to(torch.int64)
    packed = (nibbles << torch.arange(0, 32, BITS, device=words.device)).sum(1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).reshape(words.shape)


def from_lanes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of to_lanes(): int32 [inputs, outputs / 8] from its shape."""
    inputs, outputs = words.shape[0], words.shape[1] * 8
    shifts = torch.arange(0, 32, BITS, device=words.device, dtype=torch.int32)
    size = (outputs // LANES_OUTPUTS, inputs // LANES_INPUTS, 8, 4, 4, 2, 2, 2)
    nibbles = ((words.reshape(-1, 1) >> shifts) & LEVELS).reshape(size)
    return pack(nibbles.permute(1, 3, 4, 6, 5, 0, 7, 2).reshape(inputs, outputs))


# ---------------------------------------------------------------- panels


def fits_panels(group: int) -> bool:
    """Whether native/cpu takes words in panels for groups of so many inputs."""
    return group > 0 and PANELS_INPUTS % group == 0


def in_panels(words: torch.Tensor) -> bool:
    """Whether the shape of this tensor says that its words lie so."""
    return words.dim() == 3


def mark_panels(words: torch.Tensor) -> torch.Tensor:
    """The same memory, [inputs, outputs / 8], in the shape that says so."""
    return words[None]


def to_panels(words: torch.Tensor) -> torch.Tensor:
    """A checkpoint's words in the order native/cpu reads one row after the other (native/kernels.h), as
    [1, inputs, outputs / 8]: tiles of 128 inputs by 16 words; in a tile an input's words lie one behind
    the other.
    """
    out, start = torch.empty_like(words, memory_format=torch.contiguous_format), 0
    for whole, last in _tiles(out):
        rows = words[start : start + whole.shape[0] * whole.shape[2]]
        start += len(rows)
        rows, edge = rows.view(whole.shape[0], whole.shape[2], -1), whole.shape[1] * PANELS_WORDS
        whole.copy_(rows[..., :edge].unflatten(2, (whole.shape[1], PANELS_WORDS)).transpose(1, 2))
        last.copy_(rows[..., edge:])
    return mark_panels(out)


def from_panels(words: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """The inverse of to_panels(): [inputs, outputs / 8], or its words start..stop of each input."""
    words = words[0]
    stop = words.shape[1] if stop is None else stop
    first, behind = start // PANELS_WORDS, -(-stop // PANELS_WORDS)
    parts = []
    for whole, last in _tiles(words):
        found = whole[:, first:behind].transpose(1, 2).flatten(2)
        if behind > whole.shape[1]:
            found = torch.cat([found, last], 2)
        parts.append(found.flatten(0, 1))
    edge = first * PANELS_WORDS
    return torch.cat(parts)[:, start - edge : stop - edge].contiguous()


def _tiles(words: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the full tiles, then of the last inputs: where whole panels lie, [tile, panel, input, word], and the
    last one, [tile, input, word].
    """
    (inputs, width), flat = words.shape, words.reshape(-1)
    full, panels = inputs // PANELS_INPUTS * PANELS_INPUTS, width // PANELS_WORDS
    for start, stop, high in ((0, full, PANELS_INPUTS), (full, inputs, inputs - full)):
        if start < stop:
            tiles = flat[start * width : stop * width].view(-1, high * width)
            edge = high * panels * PANELS_WORDS
            whole = tiles[:, :edge].unflatten(1, (panels, high, PANELS_WORDS))
            yield whole, tiles[:, edge:].unflatten(1, (high, width - panels * PANELS_WORDS))
