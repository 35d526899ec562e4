"""Which token may come next, so that an answer is JSON of a schema: llguidance over the model's tokenizer.

Owns the compiled tokenizer, made once. Never chooses. Invariant: a schema that cannot be enforced is an error
before anything is computed, never an answer that does not fit.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch

from kvclient.serve.errors import ApiError

MOST_SCHEMA_BYTES = 64 << 10


class Grammars:
    """Of one tokenizer. Raises ApiError 400 where llguidance is not installed or refuses a schema."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._made: Any = None
        self._lock = threading.Lock()

    def json(self, schema: dict[str, Any] | None) -> Matcher:
        """What keeps an answer to the schema; None: any JSON object. Raises ApiError for what is too large or
        wrong.
        """
        try:
            import llguidance
        except ImportError:
            raise ApiError(400, "structured output needs llguidance: pip install llguidance") from None
        schema = {"type": "object"} if schema is None else schema
        spelled = json.dumps(schema)
        if len(spelled) > MOST_SCHEMA_BYTES:
            raise ApiError(400, f"the schema has {len(spelled)} bytes; the limit is {MOST_SCHEMA_BYTES}")
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": "[ \\n]?"}
            )
            matcher = llguidance.LLMatcher(self._compiled(), grammar)
        except Exception as error:  # llguidance raises its own kinds, and ValueError
            raise ApiError(400, f"the schema cannot be enforced: {error}", param="response_format") from error
        if matcher.is_error():
            reason = matcher.get_error()
            raise ApiError(400, f"the schema cannot be enforced: {reason}", param="response_format")
        return Matcher(matcher, self._vocabulary)

    def _compiled(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
            return self._made


class Matcher:
    """Of one answer."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        from llguidance.torch import allocate_token_bitmask

        self._matcher = matcher
        self._bits = allocate_token_bitmask(1, vocabulary)

    @property
    def over(self) -> bool:
        """Nothing may follow: what does is not looked at, as a draft may go on behind the end."""
        return bool(self._matcher.is_stopped())

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores [vocabulary] with -inf for tokens that cannot come next."""
        from llguidance.torch import apply_token_bitmask_inplace, fill_next_token_bitmask

        if self.over:
            return scores
        fill_next_token_bitmask(self._matcher, self._bits)
        scores = scores.clone()[None]
        apply_token_bitmask_inplace(scores, self._bits)
        return scores[0]

    def take(self, token: int) -> None:
        """The token was chosen. Raises RuntimeError if the grammar forbids it."""
        if not self.over and not self._matcher.consume_token(token):
            raise RuntimeError(f"token {token} was chosen although the grammar forbids it")
