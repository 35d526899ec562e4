"""A conversation that goes on in bounded memory, and that another process can take over.

    talk = engine.conversation("alice", system="You are brief.", window=Window(recent=512, older=2048))
    print(talk.say("Hello!").text, talk.held.saved_bytes)

Owns the order of a turn: catch up with the store, compute, choose, save. Never keeps the words: they are the
application's. Invariant: after say() the store holds the whole state, or `saved` says that it does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvclient.errors import InvalidArgument
from kvclient.hf.call import FAILURES
from kvclient.hf.decoding.stopping import Listener
from kvclient.hf.engine.saved_state import SavedState, State
from kvclient.hf.engine.window import Held, Window, WindowCache
from kvclient.hf.model.structure import Refused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """One answer."""

    text: str
    tokens: list[int]
    ttft_s: float
    total_s: float
    finish: str  # "stop": the end of the text or a stop string; "length"; "sentence": soft_stop
    held: Held
    saved: bool  # whether the store holds the conversation as it is now
    taken_over: bool  # whether it went on where another process, or object, had left off


class Conversation:
    """Made by Engine.conversation(). One thread at a time, and one process at a time: each say() begins with
    the newest state in the store.
    """

    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, saved_state: SavedState, window: Window,
        system: Sequence[int], ends: frozenset[int], weights: Callable[[], bytes],
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._saved_state, self._ends = model, tokenizer, saved_state, ends
        self._window, self._system = window, list(system)
        self._weights, self._computed_by = weights, weights()
        self._state = State()
        self._cache = self._begun()
        self._taken_over = self._catch_up()  # by a turn that is still to come

    @property
    def turn(self) -> int:
        """Turns so far; above 0 in a new object if a conversation of this name is in the store."""
        return self._state.turn

    @property
    def held(self) -> Held:
        """What is held now; live during on_token too."""
        return self._cache.held

    def say(
        self, text: str | Sequence[int], max_new_tokens: int = 64, *,
        on_token: Callable[[int, str], None] | None = None, stop: str | Sequence[str] = (),
        soft_stop: float = 1.0, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
        repetition_penalty: float = 1.0,
    ) -> Turn:  # fmt: skip
        """Computes `text` behind all that was said, and an answer. temperature 0 takes the most likely token;
        repetition_penalty is on the tokens of this turn, asked and answered. soft_stop: from this share of
        max_new_tokens on, the answer ends with a sentence.
        The text is taken as it stands: roles and their marks are the application's. An end token is part of
        the conversation, a stop string too; neither is shown. A turn that fails is undone: the next goes on
        from the one before, saved or not. Raises Refused if the model was changed since the last turn:
        forget() begins anew.
        Raises InvalidArgument for a text without tokens, or without room for an answer.
        """
        began = time.perf_counter()
        if max_new_tokens < 1:
            raise InvalidArgument(f"max_new_tokens={max_new_tokens}; it must be 1 at least")
        self._check_weights()
        self._taken_over = self._catch_up() or self._taken_over
        new = self._encode(text)
        if not new:
            raise InvalidArgument("there is nothing to say: a text without tokens")
        warpers = _warpers(temperature, top_p, top_k)
        penalty = _penalty(repetition_penalty)
        stops = [mark for mark in ([stop] if isinstance(stop, str) else stop) if mark]
        limits = [max_new_tokens]
        listener = Listener(limits, self._tokenizer, self._ends, stops, on_token, began, soft_stop)
        fed = [*([self._state.pending] if self._state.pending >= 0 else []), *new]
        fed = [*self._system, *fed] if not self._cache.tokens else fed
        self._cache.check_room(len(fed) + max_new_tokens)
        done, before, back = False, self._state, self._cache.keep()
        try:
            while not done:
                logits = self._cache.feed(fed)
                fed = [_chosen(logits[None].float(), [*penalty, *warpers], new, temperature > 0)]
                new.append(fed[0])
                done = bool(listener(torch.tensor([fed]), None)[0])
            self._check_weights()
            self._state = State(self._state.turn + 1, fed[0])
            saved = self._saved()
        except BaseException:
            self._state = before  # half a turn is none; those before it may be held here only
            back()
            raise
        tokens, answer, finish = listener.answer(0)
        total = time.perf_counter() - began
        taken_over, self._taken_over = self._taken_over, False
        return Turn(answer, tokens, listener.first_at - began, total, finish, self.held, saved, taken_over)

    def forget(self) -> None:
        """Deletes the conversation from the store, and begins anew."""
        self._saved_state.forget()
        self._state, self._cache, self._taken_over = State(), self._begun(), False

    def _begun(self) -> WindowCache:
        cache = WindowCache(self._model, self._window)
        cache.head_tokens = max(len(self._system), self._window.sink_tokens)
        return cache

    def _check_weights(self) -> None:
        """The KV of one model means nothing to another."""
        now = self._weights()
        if self._cache.tokens and now != self._computed_by:
            raise Refused("the model was changed: what this conversation holds was computed by another")
        self._computed_by = now

    def _catch_up(self) -> bool:
        """Takes what the store has if that is newer than what is here."""
        if self._saved_state.newest() <= self._state.turn:
            return False
        cache = self._begun()
        state = self._saved_state.load(cache)
        if state is None:
            return False
        self._cache, self._state = cache, state
        return True

    def _saved(self) -> bool:
        try:
            return self._saved_state.save(self._cache, self._state)
        except InvalidArgument:
            raise  # a window that no block can hold is its caller's to mend
        except FAILURES as error:
            log.warning("a turn was not kept: %s: %s", type(error).__name__, error)
            return False

    def _encode(self, text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str):
            return list(self._tokenizer(text, add_special_tokens=not self._cache.tokens)["input_ids"])
        return [int(token) for token in text]


def _warpers(temperature: float, top_p: float, top_k: int) -> list[Any]:
    if not (temperature >= 0 and 0 < top_p <= 1 and top_k >= 0):
        values = f"temperature={temperature}, top_p={top_p}, top_k={top_k}"
        raise InvalidArgument(f"{values}; allowed are ≥ 0, above 0 to 1, ≥ 0")
    if not temperature:
        return []
    more = [TopKLogitsWarper(top_k)] if top_k else []
    return [TemperatureLogitsWarper(temperature), *more, TopPLogitsWarper(top_p)]


def _penalty(repetition_penalty: float) -> list[Any]:
    if not repetition_penalty > 0:
        raise InvalidArgument(f"repetition_penalty={repetition_penalty}; it must be above 0")
    return [RepetitionPenaltyLogitsProcessor(repetition_penalty)] if repetition_penalty != 1 else []


def _chosen(scores: torch.Tensor, processors: list[Any], said: list[int], sampled: bool) -> int:
    if processors:
        tokens = torch.tensor([said], device=scores.device)
        for process in processors:
            scores = process(tokens, scores)
    return int(torch.multinomial(scores.softmax(-1), 1)) if sampled else int(scores.argmax())
