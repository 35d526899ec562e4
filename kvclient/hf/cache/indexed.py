"""A layer that keeps more of each token than K and V: the keys of an indexer, which says what is attended to.

Owns nothing of its own: what it keeps besides lies in StoreLayers, as K and V do. A StoreLayer of such a part
has a number behind those of the model's layers. Invariant: all parts have seen the same tokens, whatever is
done to rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kvclient.hf.cache.layer import StoreLayer


def number_of(layer: int, layers: int) -> int:
    """What the keys of this layer's indexer are numbered, in a model of so many layers."""
    return layers + layer


class IndexedLayer(StoreLayer):
    """With what transformers' DynamicIndexedLayer has besides."""

    indexer: StoreLayer  # of one head, K only

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

    def reset(self) -> None:
        super().reset()
        self.indexer.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.indexer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.indexer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.indexer.batch_select_indices(indices)


def with_parts(layers: list[StoreLayer], count: int) -> list[StoreLayer]:
    """The layers of a model of `count`, each with the parts of it that are among them."""
    numbered = {layer.index: layer for layer in layers}
    for number, layer in numbered.items():
        if number >= count:
            owner: Any = numbered[number - count]
            owner.indexer = layer
    return [layer for number, layer in numbered.items() if number < count]
