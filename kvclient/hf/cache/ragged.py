"""The newest tokens of several requests through a model in one forward pass, each over its own cache.

Owns nothing: a step borrows the caches of the requests it computes, whatever their lengths, and leaves in
each its new tokens: one, or several where a draft is looked at. Never pads: each token is a row of the pass.
Invariant: a row attends to its own request's keys and to no other's, so its logits are what they would be
alone, up to the order in which a matrix product sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof
from itertools import accumulate
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvclient.hf.attention import dense
from kvclient.hf.attention.handle import forget_pending, give_handle, stepping
from kvclient.hf.cache.in_place import InPlaceLayer
from kvclient.hf.cache.layer import as_array
from kvclient.hf.release import passing
from kvclient.kernels import contract


class RaggedLayer(CacheLayerMixin):
    """The same layer of every request's cache. counts: new tokens of each, those of one before the others.
    calls: what a layer before it asked the kernels, which is right for those alike.
    """

    def __init__(
        self, index: int, layers: Sequence[Any], counts: Sequence[int], calls: dict[Any, Any]
    ) -> None:
        super().__init__()
        self.index, self._layers, self._counts, self._calls = index, layers, counts, calls
        self._heads = 0  # of its keys, which other layers may have more of
        self._ends = list(accumulate(counts))
        self._held: list[Any] = []
        self.is_initialized = True
        self.wanted: torch.Tensor | None = None  # of the last layer, the tokens whose logits are, if not all
        self.ends = False  # of the others nothing is computed behind its attention

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """[tokens of all requests, heads, 1, D]."""
        self._held, arrays = [], (as_array(key_states), as_array(value_states))
        self._heads = key_states.shape[1]
        for layer, count, end in zip(self._layers, self._counts, self._ends, strict=True):
            if count == 1 and type(layer) is InPlaceLayer and (place := layer.next_place()) is not None:
                at, memory, _ = place
                memory[0, 0, :, at], memory[1, 0, :, at] = (states[end - 1, :, 0] for states in arrays)
                layer.took()
                self._held.append((None, None))
                continue
            pair = (states[end - count : end].transpose(0, 2) for states in (key_states, value_states))
            keys, values = layer.update(*pair)
            forget_pending()  # its attention is computed here, with the others'
            self._held.append((keys, values))
        return give_handle(key_states, self), value_states

    def next_places(self) -> list[tuple[int, Any, Any]] | None:
        """Of each request, where its one token is written (InPlaceLayer.next_place()); None: one has several,
        or takes more than that.
        """
        places = []
        for layer, count in zip(self._layers, self._counts, strict=True):
            if count != 1 or type(layer) is not InPlaceLayer or (place := layer.next_place()) is None:
                return None
            places.append(place)
        return places

    @property
    def lengths(self) -> list[int]:
        """Of each request, how many tokens it holds."""
        return [layer.get_seq_length() for layer in self._layers]

    def took(self) -> None:
        """All were written there."""
        for layer in self._layers:
            layer.took()

    def takes(self, reason: str | None, causal: bool) -> bool:
        """Always True: there is no other way. Raises RuntimeError for a call that the kernels do not take."""
        if reason is not None or not causal:
            raise RuntimeError(f"a step of several requests wants what the kernels do not take ({reason})")
        return True

    def attend(
        self, query: torch.Tensor, sinks: torch.Tensor | None, scale: float, softcap: float, window: int,
        path: int,
    ) -> torch.Tensor:  # fmt: skip
        """[tokens of all requests, 1, heads, D], of each over its own request's keys up to itself."""
        query = dense.heads_together(query)
        out = dense.empty(query, (query.shape[0], 1, query.shape[1], query.shape[3]))
        sinks = None if sinks is None else sinks.float().contiguous()
        singles = self._counts.count(1)
        parts = [range(singles)] if singles else []
        for part in [*parts, *((row,) for row in range(singles, len(self._layers)))]:
            first, last = part[0], part[-1]
            rows = slice(self._ends[first] - self._counts[first], self._ends[last])
            part_query, place = query[rows], out[rows]
            if first >= singles:  # the tokens of one request: [1, heads, T, D]
                part_query, place = part_query.transpose(0, 2), place.transpose(0, 1)
            self._attend(part, part_query, place, sinks, scale, softcap, window, path)
        return out

    def _attend(
        self, part: Sequence[int], query: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None,
        scale: float, softcap: float, window: int, path: int,
    ) -> None:  # fmt: skip
        """query: [B, heads, T, D], T new tokens of each request of this part; out: [B, T, heads, D]."""
        lengths = tuple(self._layers[row].get_seq_length() for row in part)
        strides = query.stride(), out.stride()
        like = (lengths, query.dtype, query.shape, *strides, self._heads, scale, softcap, window, path)
        if (known := self._calls.get(part[0])) is None or known[0] != like:
            position = torch.tensor(lengths)[:, None] + torch.arange(-query.shape[2], 0)
            args = dense.arguments(query, out, self._heads, position, scale, path)
            args.softcap, args.window = softcap, window
            known = self._calls[part[0]] = (like, args, position)
        args = known[1]
        args.q, args.out = query.data_ptr(), out.data_ptr()
        args.sinks = None if sinks is None else sinks.data_ptr()
        sequences = (contract.Sequence * len(part))()
        for place, row in enumerate(part):
            sequences[place] = self._sequence(self._layers[row], *self._held[row])
        args.sequences = addressof(sequences)
        dense.run(args)

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to set up: the requests' layers are."""

    def _sequence(self, layer: Any, keys: Any, values: Any) -> Any:
        if isinstance(layer, InPlaceLayer) and layer.in_place:
            return layer.sequences()[0]
        sequence = contract.Sequence()
        first = layer.get_seq_length() - keys.shape[2]  # one with a window has dropped those before
        sequence.tail = dense.dense_segment(keys, values, 0, 0, first)
        return sequence


def cache_of(caches: Sequence[Any], counts: Sequence[int], make: Callable[..., Any]) -> Cache:
    """Of one step. caches: of one row each, at least one token long. make: of what class its layers are."""
    calls: dict[Any, Any] = {}
    layers = zip(*(cache.layers for cache in caches), strict=True)
    return Cache(layers=[make(i, row, counts, calls) for i, row in enumerate(layers)])


def step(
    model: torch.nn.Module, tokens: Sequence[Sequence[int]], caches: Sequence[Any],
    wanted: Sequence[int] | None = None, make: Callable[..., Any] = RaggedLayer,
) -> list[torch.Tensor]:  # fmt: skip
    """The logits [T, vocabulary] behind T new tokens of each request, which its cache then holds. wanted:
    of each request, for how many of its last tokens; None: for all. The model's attention must be one of
    kvclient.hf.attention. make: of the layers, as on a GPU others are needed (ragged_device.py).
    """
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]) > 1)
    counts = [len(tokens[row]) for row in order]
    last = counts if wanted is None else [wanted[row] for row in order]
    device = model.device
    ids = torch.tensor([[token] for row in order for token in tokens[row]], device=device)
    starts = [caches[row].get_seq_length() for row in order]
    columns = [[start + i] for start, count in zip(starts, counts, strict=True) for i in range(count)]
    places = torch.tensor(columns, device=device)
    ends = zip(accumulate(counts), last, strict=True)
    rows = torch.tensor([row for end, count in ends for row in range(end - count, end)], device=device)
    cache = cache_of([caches[row] for row in order], counts, make)
    some, head = rows if len(rows) < len(ids) else None, model.get_output_embeddings()
    seen = head is not None and (head._forward_hooks or head._forward_pre_hooks)
    cache.layers[-1].wanted = None if seen else some
    with torch.no_grad(), stepping(), _head_over(head, some):
        out = type(model).forward(
            model, input_ids=ids, position_ids=places, use_cache=True, return_dict=True, **passing(cache),
        )  # fmt: skip
    logits = out.logits[:, -1]
    parts = (logits if len(logits) == len(rows) else logits[rows]).split(last)
    return [parts[place] for place in sorted(range(len(order)), key=order.__getitem__)]


@contextlib.contextmanager
def _head_over(head: Any, rows: torch.Tensor | None) -> Iterator[None]:
    """Within it, the model's head sees these rows only: it is a tenth of the work, and a prompt wants one.
    The last layer may have left out the others.
    """
    if rows is None or head is None:
        yield
        return

    def some(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs if len(inputs[0]) == len(rows) else (inputs[0][rows], *inputs[1:])

    hook = head.register_forward_pre_hook(some)
    try:
        yield
    finally:
        hook.remove()
