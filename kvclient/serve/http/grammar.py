"""Which token may come next, so that an answer is JSON of a schema: llguidance over the model's tokenizer.

Owns the compiled tokenizer, made once. Never chooses. Invariant: a schema that cannot be enforced is an error
before anything is computed, never an answer that does not fit.

llguidance.torch is left alone: it has torch compile a program for the mask, at a step that others wait for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvclient.serve.errors import ApiError

MOST_SCHEMA_BYTES = 64 << 10
VALUES = {"const", "enum", "default", "examples"}  # keywords behind which no schemas stand
NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}  # schemas by name


class Grammars:
    """Of one tokenizer; for any thread, and not for one that others wait for: the first schema takes as long
    as the tokenizer has words. Raises ApiError 400 where llguidance is not installed or refuses a schema.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._made: Any = None
        self._lock = threading.Lock()

    def json(self, schema: dict[str, Any] | None, param: str = "response_format") -> Matcher:
        """What keeps an answer to the schema; None: any JSON object. param: where it came from. Raises
        ApiError for what is too large or wrong.
        """
        try:
            import llguidance
        except ImportError:
            raise ApiError(400, "structured output needs llguidance: pip install llguidance") from None
        schema = {"type": "object"} if schema is None else schema
        try:
            spelled = json.dumps(schema)
        except RecursionError:
            raise ApiError(400, "the schema is nested too deep", param=param) from None
        if len(spelled) > MOST_SCHEMA_BYTES:
            text = f"the schema has {len(spelled)} bytes; the limit is {MOST_SCHEMA_BYTES}"
            raise ApiError(400, text, param=param)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": "[ \\n]?"}
            )
            matcher = llguidance.LLMatcher(self._compiled(), grammar)
        except Exception as error:  # llguidance raises its own kinds, and ValueError
            raise ApiError(400, f"the schema cannot be enforced: {error}", param=param) from error
        if matcher.is_error():
            reason = matcher.get_error()
            raise ApiError(400, f"the schema cannot be enforced: {reason}", param=param)
        return Matcher(matcher)

    def _compiled(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
            return self._made


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """The JSON that a call of one of these tools is. tools: (name, schema of its arguments); None: any
    object. Raises RecursionError.
    """
    place = "#/properties/arguments" if len(tools) == 1 else "#/anyOf/{}/properties/arguments"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": moved(arguments or {"type": "object"}, place.format(index)),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, (name, arguments) in enumerate(tools)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def moved(schema: Any, place: str, names: bool = False) -> Any:
    """A schema for this place in another, a JSON pointer: where it names a part of its own (`$ref:
    #/$defs/Item`, as pydantic has it), it names where that is now. names: its keys are no keywords. Raises
    RecursionError.
    """
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: part if not names and key in VALUES else moved(part, place, not names and key in NAMED)
        for key, part in schema.items()
    }
    pointer = schema.get("$ref")
    if not names and isinstance(pointer, str) and pointer.startswith("#"):
        out["$ref"] = place + pointer[1:]
    return out


class Matcher:
    """Of one answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fresh(self) -> Matcher:
        """For another answer of the same schema, compiled once. Of one that took nothing yet."""
        return Matcher(self._matcher.deep_copy())

    @property
    def over(self) -> bool:
        """Nothing may follow: what does is not looked at, as a draft may go on behind the end."""
        return bool(self._matcher.is_stopped())

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores [vocabulary] with -inf for tokens that cannot come next."""
        if self.over:
            return scores
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = torch.zeros(len(scores), dtype=torch.bool)
        known = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), len(scores)))
        allowed[: len(known)] = torch.from_numpy(known)
        return scores.masked_fill(~allowed, float("-inf"))

    def take(self, token: int) -> None:
        """The token was chosen. Raises RuntimeError if the grammar forbids it."""
        if not self.over and not self._matcher.consume_token(token):
            raise RuntimeError(f"token {token} was chosen although the grammar forbids it")
