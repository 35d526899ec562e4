"""A layer that keeps K and V of each token in the store's memory, and a state of all of them beside.

Owns neither way: K and V are a StoreLayer's, the state is transformers' own. Invariant: both have seen the
same tokens, whatever is done to rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kvclient.hf.cache.layer import StoreLayer
from kvclient.hf.release import STATES

BOTH: Any = STATES[1] if len(STATES) > 1 else object


class HybridLayer(StoreLayer, BOTH):
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        BOTH.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        StoreLayer.reset(self)
        STATES[0].reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        StoreLayer.reorder_cache(self, beam_idx)
        STATES[0].reorder_cache(self, beam_idx)

    def crop(self, count: int) -> None:
        STATES[0].crop(self, count)
        StoreLayer.crop(self, count)

    def offload(self) -> None:
        STATES[0].offload(self)

    def prefetch(self) -> None:
        STATES[0].prefetch(self)
