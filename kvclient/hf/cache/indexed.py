"""A layer that keeps more of each token than K and V: the keys of an indexer, which says what is attended to.

Owns nothing of its own: what it keeps besides lies in StoreLayers, as K and V do. A StoreLayer of such a part
has a number behind those of the model's layers. Invariant: all parts have seen the same tokens, whatever is
done to rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kvclient.hf.cache.layer import StoreLayer


def number_of(layer: int, layers: int, part: int = 0) -> int:
    """How what this layer keeps besides is numbered, in a model of so many layers."""
    return layers * (part + 1) + layer


class IndexedLayer(StoreLayer):
    """With what transformers' DynamicIndexedLayer has besides."""

    indexer: StoreLayer  # of one head, K only
    # Positions [kinds, rows, tokens], where a model keeps them here (Qwen4); rows have no padding then.
    indexer_position_ids: torch.Tensor | None = None

    def put(self, part: int, layer: StoreLayer) -> None:
        """Takes its one part."""
        assert part == 0, f"an indexer has keys, and no part {part}"
        self.indexer = layer

    @property
    def parts(self) -> list[StoreLayer]:
        """What it keeps besides."""
        return [self.indexer]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """New keys [rows, tokens, width]; all of them."""
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """Those so far, [rows, tokens, width]."""
        return None if self.indexer.keys is None else self.indexer.keys[:, 0]

    def crop(self, count: int) -> None:
        super().crop(count)
        self.indexer.crop(count)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., : self.indexer.get_seq_length()]

    def reset(self) -> None:
        super().reset()
        self.indexer.reset()
        self.indexer_position_ids = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.indexer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.indexer.batch_repeat_interleave(repeats)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids.repeat_interleave(repeats, dim=1)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.indexer.batch_select_indices(indices)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[:, indices]


def with_parts(layers: list[StoreLayer], count: int) -> list[StoreLayer]:
    """The layers of a model of `count`, each with the parts of it that are among them."""
    numbered = {layer.index: layer for layer in layers}
    for number, layer in numbered.items():
        if number >= count:
            owner: Any = numbered[number % count]
            owner.put(number // count - 1, layer)
    return [layer for number, layer in numbered.items() if number < count]


def every_part(layers: list[StoreLayer]) -> list[StoreLayer]:
    """The layers of a cache, with what they keep besides."""
    return [part for layer in layers for part in (layer, *getattr(layer, "parts", ()))]


def set_positions(cache: Any, kinds: tuple[int, int], tokens: int, rows: int, device: torch.device) -> None:
    """The positions of the first so many tokens, where a model keeps so many kinds of them in a layer."""
    count, place = kinds
    if count and tokens:
        known = torch.arange(tokens, device=device)
        cache.layers[place].indexer_position_ids = known.expand(count, rows, tokens)
