"""A layer of DeepSeek V4: K and V within a window, and entries that the tokens before are compressed to.

Owns the tokens that wait for their entry to be full. An entry of `rate` tokens is spread over their columns,
so that it lies in StoreLayers as K and V do, and a block holds what its tokens were compressed to. Where
entries overlap, what the next one needs of the last one's tokens is a layer too. Invariant: the entries say
how many tokens were compressed; at a multiple of `rate` none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvclient.hf.cache.layer import StoreLayer

NAMES = ("compressor", "indexer")
ENTRIES, OVERLAP = range(2)  # of each name: its parts are numbered so, one name behind the other


class CompressedLayer(StoreLayer):
    """With what transformers' caches of both kinds of compressed attention have besides."""

    rate = 1  # tokens of an entry

    def put(self, part: int, layer: StoreLayer) -> None:
        """Takes one of its parts, by its number."""
        vars(self).setdefault("_parts", {})[NAMES[part // 2], part % 2] = layer
        vars(self).setdefault("_waiting", {})

    @property
    def parts(self) -> list[StoreLayer]:
        """What it keeps besides."""
        return list(self._parts.values())

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """New tokens [rows, tokens, width]. Of those that wait and these what fills entries, and the first's
        position; the rest waits.
        """
        if name in self._waiting:
            waiting = self._waiting[name]
            kv, gate = torch.cat([waiting[0], kv], dim=1), torch.cat([waiting[1], gate], dim=1)
        if (overlap := self._parts.get((name, OVERLAP))) is not None:
            overlap.load()  # now, not when an entry is full
        full = kv.shape[1] // self.rate * self.rate
        self._waiting[name] = kv[:, full:], gate[:, full:]
        return kv[:, :full], gate[:, :full], self._parts[name, ENTRIES].get_seq_length()

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """New entries [rows, entries, width]; all of them."""
        rows, count, width = compressed.shape
        spread = compressed.reshape(rows, 1, count * self.rate, width // self.rate)
        found = self._parts[name, ENTRIES].update(spread, spread[..., :0])[0]
        return found.reshape(rows, found.shape[2] // self.rate, width)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """New tokens [rows, entries, rate, width], of which the next entry needs the first head_dim. Those of
        the last entry before.
        """
        part = self._parts[name, OVERLAP]
        before = part.get_seq_length()
        new = (t[..., :head_dim].flatten(1, 2)[:, None] for t in (chunk_kv, chunk_gate))
        kv, gate = part.update(*new)
        if not before:
            return None, None
        last = slice(before - self.rate, before)
        return kv[:, 0, last], gate[:, 0, last]

    def crop(self, count: int) -> None:
        """Raises RuntimeError: transformers' own cannot either."""
        raise RuntimeError("compressed tokens cannot be taken out of an entry again")

    def reset(self) -> None:
        super().reset()
        self._waiting.clear()
        for part in self._parts.values():
            part.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        for part in self._every(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device))):
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for part in self._every(lambda tensor: tensor.repeat_interleave(repeats, dim=0)):
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        for part in self._every(lambda tensor: tensor[indices]):
            part.batch_select_indices(indices)

    def _every(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[StoreLayer]:
        """Its parts, behind changing what waits."""
        self._waiting = {name: (change(kv), change(gate)) for name, (kv, gate) in self._waiting.items()}
        yield from self._parts.values()
