"""A step of one token of each of several requests (kvclient.hf.cache.ragged) through all decoder layers, in
one call of native/cpu, beside which other threads run.

Owns what such a step computes in, for up to ROWS requests. Never looks at the model: stack.py does, and
proves the first such step. Invariant: the bits are those of the layers one by one, and a step that fails
leaves every cache as it was.
"""

from __future__ import annotations

from ctypes import addressof, byref, sizeof
from typing import Any

import numpy as np
import torch

from kvclient.hf.attention import dense
from kvclient.hf.cache.ragged import RaggedLayer
from kvclient.hf.layers.decoder import Layer
from kvclient.hf.layers.fused import ROWS, Calls, lay
from kvclient.kernels import contract

Places = list[list[tuple[int, Any, Any]]]  # of each layer and request, as RaggedLayer.next_places() has them


class Rows:
    """One step at a time; layers of one shape."""

    def __init__(self, layers: list[Layer], calls: list[Calls], path: int) -> None:
        """path: of the kernels, by which their attention computes one query."""
        self.calls, self.path, self._layers = calls, path, layers
        dtype, heads, count = calls[0].dtype, calls[0].heads, len(layers)
        with torch.inference_mode(False):  # who comes first may be in it, and later ones not
            self._structs = [call.take() for call in calls]
            biases = [pair for pairs in map(Calls.biases, calls, self._structs) for pair in pairs]
            self._wide, self._biases = ([pair[side] for pair in biases] for side in (0, 1))
            first = self._structs[0].before
            query, key = first.query.outputs // heads, first.key.outputs // heads
            self.cos, self.sin = (torch.empty((ROWS, 1, heads), dtype=dtype, device="cpu") for _ in range(2))
            self.flow = [self.cos.new_empty((ROWS, 1, first.query.inputs)) for _ in range(3)]
            self._asks, self._out = (self.cos.new_empty((ROWS, 1, query, heads)) for _ in range(2))
            self._sides = self.cos.new_empty((2, ROWS, key, heads))
            self._position = torch.empty((ROWS, 1), dtype=torch.int64, device="cpu")
            self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        asks = self._asks.transpose(1, 2)
        attends = [dense.arguments(asks, self._out, key, self._position, 1.0, path) for _ in layers]
        self._before = (contract.LayerIn * count)(*(structs.before for structs in self._structs))
        self._behind = (contract.LayerOut * count)(*(structs.behind for structs in self._structs))
        self._attention = (contract.Attention * count)(*attends)
        self._sequences = (contract.Sequence * (count * ROWS))()
        memory = (self.cos, self.sin), self._asks, self._sides, self._out, self.flow
        for number in range(count):
            lay(self._before[number], self._behind[number], number, ROWS, *memory)
            place = addressof(self._sequences) + number * ROWS * sizeof(contract.Sequence)
            self._attention[number].sequences = place
        library = contract.cpu()
        sizes = [library.kvk_layer_in_workspace(byref(struct)) for struct in self._before]
        self._room(max(*sizes, *(library.kvk_layer_out_workspace(byref(struct)) for struct in self._behind)))

    def __call__(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], caches: list[RaggedLayer],
        places: Places,
    ) -> torch.Tensor:  # fmt: skip
        """What the last layer answers, [rows, 1, hidden], of hidden and cos and sin [rows, 1, head_dim].
        places: of each layer, as it gave them; K and V are written there, and no cache has them yet.
        """
        count = len(hidden)
        self.flow[0][:count] = hidden
        self.cos[:count], self.sin[:count] = angles
        self._position[:count, 0] = torch.tensor(caches[0].lengths)
        if self._biases:  # each time: somebody may have written into one
            torch._foreach_copy_(self._wide, self._biases)
        self._tell(count, torch.get_num_threads())
        sequences = self._sequences
        for number, here in enumerate(places):
            for row, (_, _, sequence) in enumerate(here, number * ROWS):
                sequences[row] = sequence
        library = contract.cpu()
        call = self._before, self._attention, self._behind, len(self._layers)
        status = library.kvk_layers(*call)
        if status == contract.WORKSPACE:  # the first layer's attention wants more, as all will
            self._room(library.kvk_attention_workspace(byref(self._attention[0])))
            status = library.kvk_layers(*call)
        contract.check(status)
        return self.flow[len(self._layers) % 2][:count].clone()

    def _tell(self, count: int, threads: int) -> None:
        """The structs what may be another each time."""
        parts = zip(self._layers, self._before, self._attention, self._behind, strict=True)
        for layer, before, attention, behind in parts:
            layer.fused.told(before, behind)
            before.rows = behind.rows = attention.batch = count
            before.threads = behind.threads = attention.threads = threads
            attention.scale = layer.attends.module.scaling

    def _room(self, size: int) -> None:
        """A workspace of at least so many bytes for all calls, which follow each other."""
        if size > len(self._workspace):
            with torch.inference_mode(False):
                self._workspace = torch.empty(size, dtype=torch.uint8, device="cpu")
        for part in (self._before, self._attention, self._behind):
            for struct in part:
                struct.workspace, struct.workspace_bytes = self._workspace.data_ptr(), len(self._workspace)


def ours(cache: Any) -> bool:
    """Whether it is a step's."""
    return bool(cache is not None and cache.layers) and type(cache.layers[-1]) is RaggedLayer


def places_of(cache: Any, layers: int, count: int) -> Places | None:
    """Of each layer of a step's cache, where the one token of each of so many requests is written; None: it
    takes more than that.
    """
    if not 0 < count <= ROWS or len(cache.layers) != layers:
        return None
    out = []
    for layer in cache.layers:
        if type(layer) is not RaggedLayer or (places := layer.next_places()) is None or len(places) != count:
            return None
        out.append(places)
    return out


def written(places: Places) -> list[np.ndarray]:
    """Copies of K and V [2, heads, head_dim] that were written there, of each layer and request."""
    return [memory[:, 0, :, at].copy() for here in places for at, memory, _ in here]
