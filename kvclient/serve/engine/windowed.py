"""A request whose KV is kept in a window: recent tokens as computed, older ones quantised, the oldest
dropped, and what lies in the store of it between the turns of its conversation.

Owns that cache and the state's name: a digest of the very tokens it holds, so a turn finds the state that its
prompt begins with, on any server, and a message that was edited finds the one before it. Never chooses a
token. Invariant: what is found was computed from the tokens the prompt begins with, under the same model,
window and salt.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from kvclient.hf.attachment.attach import Attachment
from kvclient.hf.call import FAILURES
from kvclient.hf.engine.saved_state import SavedState, State
from kvclient.hf.engine.window import Window, WindowCache

log = logging.getLogger(__name__)

PRIORITY = 40  # of a state, above a block's 35: a conversation goes on
BEFORE = 8  # tokens that a template may set behind an answer: its end, a line's end


@dataclass(frozen=True)
class Windowing:
    """What a request says of its window. head_tokens: of the system prompt. turn_ends: how many of the
    prompt's tokens the messages before the last question are; 0: it is the first.
    """

    window: Window
    head_tokens: int = 0
    turn_ends: int = 0

    @property
    def most_tokens(self) -> int:
        """That it ever holds."""
        window = self.window
        return (
            max(self.head_tokens, window.sink_tokens)
            + window.older
            + 2 * window.recent
            + 2 * window.codec.group
        )


class WindowedCache:
    """Of one request. Raises Refused for a model that has no such cache."""

    def __init__(self, model: torch.nn.Module, kv: Attachment, windowing: Windowing) -> None:
        self._kv, self._windowing, self.cache = kv, windowing, WindowCache(model, windowing.window)
        self.cache.head_tokens = max(windowing.head_tokens, windowing.window.sink_tokens)

    def resume(self, prompt: Sequence[int]) -> int:
        """Takes what the turn before left. Returns how many of the prompt's tokens that is."""
        ends = self._windowing.turn_ends
        for count in range(min(ends, len(prompt) - 1), max(0, ends - BEFORE), -1):
            state, back = self._state(prompt[:count]), self.cache.keep()
            try:
                if state.newest() and state.load(self.cache) is not None and self.cache.tokens == count:
                    return count
            except FAILURES as error:
                back()  # layers that were filled before it failed
                log.warning("what a turn before left was not read: %s: %s", type(error).__name__, error)
                return 0
            back()
        return 0

    def save(self, tokens: Sequence[int]) -> bool:
        """tokens: all that it has computed, from the first. False: the store has no room, or is not there."""
        assert self.cache.tokens == len(tokens), "the state would have the name of another text"
        state = self._state(tokens)
        try:
            return bool(state.newest()) or state.save(self.cache, State(1))
        except FAILURES as error:
            log.warning("what a turn left was not kept: %s: %s", type(error).__name__, error)
            return False

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits [vocabulary] behind them. What fails is undone."""
        back = self.cache.keep()
        try:
            return self.cache.feed(tokens)
        except BaseException:
            back()
            raise

    def told(self) -> dict[str, int]:
        """For the page: tokens by class, bytes, what quantising saved."""
        held = self.cache.held
        return {**asdict(held), "bytes": held.bytes, "saved_bytes": held.saved_bytes}

    def _state(self, tokens: Sequence[int]) -> SavedState:
        digest = hashlib.sha256(np.asarray(tokens, np.uint32).tobytes()).hexdigest()
        name = f"kvclient-serve {self._windowing.head_tokens} {digest}"
        return SavedState(
            self._kv.client, lambda: self._kv.identity, name, self._windowing.window, PRIORITY
        )  # fmt: skip
