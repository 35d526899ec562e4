"""A layer that keeps K and V of each token in the store's memory, and a state of all of them beside.

Owns neither way: K and V are a StoreLayer's, the state is transformers' own. Invariant: both have seen the
same tokens, whatever is done to rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kvclient.hf.cache.layer import StoreLayer
from kvclient.hf.release import BOTH, STATES


class HybridLayer(StoreLayer, BOTH):
    def of_states(self, count: int) -> HybridLayer:
        """Itself, with room for so many states."""
        for index in range(self.number_of_states, count):
            for kept in (self.conv_states, self.recurrent_states, self.conv_kernel_size):
                kept[index] = None
            for known in (
                self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state
            ):  # fmt: skip
                known[index] = False
        self.number_of_states = max(count, self.number_of_states)
        return self

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
