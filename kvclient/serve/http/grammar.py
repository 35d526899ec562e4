"""Which token may come next, so that an answer is JSON of a schema, or a text whose calls of tools are:
llguidance over the model's tokenizer.

Owns the compiled tokenizer, made once. Never chooses. Invariant: a schema that cannot be enforced is an error
before anything is computed, never an answer that does not fit.

llguidance.torch is left alone: it has torch compile a program for the mask, at a step that others wait for.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kvclient.errors import InvalidArgument
from kvclient.serve.errors import ApiError
from kvclient.serve.http.reasoning import CLOSE, OPEN
from kvclient.serve.http.tools import LISTED, LLAMA, TAG, TAG_END, TYPED, WHITE

MOST_SCHEMA_BYTES = 64 << 10
VALUES = {"const", "enum", "default", "examples"}  # keywords behind which no schemas stand
BOUNDS = ("too many", "complex", "max is")  # of llguidance, in its words: a row's items, a lexer's states
SPACES = {"whitespace_pattern": "[ \\n]?"}
NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}  # schemas by name


class Grammars:
    """Of one tokenizer; for any thread, and not for one that others wait for: the first schema takes as long
    as the tokenizer has words. Raises ApiError 400 where llguidance is not installed or refuses a schema.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int] = ()) -> None:
        """ends: the tokens that end an answer; none: the tokenizer's own."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(ends)
        self._made: Any = None
        self._lock = threading.Lock()

    def json(self, schema: dict[str, Any] | None, param: str = "response_format") -> Matcher:
        """What keeps an answer to the schema; None: any JSON object. param: where it came from. Raises
        ApiError for what is too large or wrong.
        """
        schema = {"type": "object"} if schema is None else schema
        return self._matcher(
            schema, param, lambda found: found.grammar_from_json_schema(schema, overrides=SPACES)
        )

    def calls(self, tools: Sequence[tuple[str, dict[str, Any] | None]], thinks: bool | None) -> Matcher:
        """What keeps the calls in a text to the tools' schemas, wherever SpokenCalls reads one that is
        spelled in its order. tools: as of call_schema(); thinks: as Ask.reasoning has it. Raises what json()
        does, and ApiError for a schema of anything but objects.
        """
        schemas = []
        for name, schema in tools:
            if (schema or {}).get("type", "object") != "object":
                raise ApiError(400, f"the parameters of {name} are no object's", param="tools")
            schemas.append({**(schema or {}), "type": "object", "x-guidance": SPACES})
        names = [name for name, _ in tools]
        return self._matcher(
            schemas, "tools",
            lambda found: found.grammar_from_lark(calls_grammar(names, schemas, thinks, self._special)),
        )  # fmt: skip

    def _special(self, mark: str) -> int | None:
        """The token that a mark is, where that is one whose letters no text has."""
        token = self._tokenizer.convert_tokens_to_ids(mark)
        known = isinstance(token, int) and self._tokenizer.convert_ids_to_tokens(token) == mark
        return token if known and self._compiled().is_special_token(token) else None

    def _matcher(self, schema: Any, param: str, grammar: Callable[[Any], str]) -> Matcher:
        try:
            import llguidance
        except ImportError:
            raise ApiError(400, "structured output needs llguidance: pip install llguidance") from None
        try:
            spelled = json.dumps(schema)
        except RecursionError:
            raise ApiError(400, "the schema is nested too deep", param=param) from None
        if len(spelled) > MOST_SCHEMA_BYTES:
            text = f"the schema has {len(spelled)} bytes; the limit is {MOST_SCHEMA_BYTES}"
            raise ApiError(400, text, param=param)
        try:
            matcher = llguidance.LLMatcher(self._compiled(), grammar(llguidance.LLMatcher))
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
                ends = self._ends or None
                self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)
            return self._made


def calls_grammar(
    names: Sequence[str], schemas: Sequence[Any], thinks: bool | None, special: Callable[[str], int | None]
) -> str:
    """A text in llguidance's Lark: free up to a mark, behind which a call must come; at its start the first
    letters of a call are one. names, schemas: of the tools. thinks: as Ask.reasoning has it, thoughts are
    free. special: Grammars._special.
    """

    def mark(name: str, word: str, before: str) -> list[str]:
        """The rule that ends with a word, whichever tokens spell it."""
        token = special(word)
        ways = f"{name}_told" + ("" if token is None else f" | {before}<[{token}]>")
        return [f"{name}: {ways}", f"{name}_told[lazy]: /{TEXTS[before]}{_escaped(word)}/"]

    order = f'{TYPED}"name"{WHITE}:{WHITE}"%s"{WHITE},{WHITE}"(arguments|parameters)"{WHITE}:'
    rules = [
        *mark("tag", TAG, "TEXT "), *mark("list", LISTED, "TEXT "), *mark("llama", LLAMA, "BLANK? "),
        *mark("tag_end", TAG_END, ""), *mark("opened", OPEN, "BLANK? "), *mark("thought", CLOSE, "TEXT "),
        "call: " + " | ".join(f"call_{at}" for at in range(len(names))),
        "calls: call (WS? \",\" WS? call)* WS? \"]\"",
        "marked: tag WS? call WS? tag_end | list WS? (\"[\" WS? calls | call)",
        "first: llama WS? call | " + " | ".join(f"bare_{at} | bares_{at}" for at in range(len(names))),
    ]  # fmt: skip
    for at, (name, schema) in enumerate(zip(names, schemas, strict=True)):
        head = order % _escaped(name)
        rules += [
            f"call_{at}: \"{{\" WS? head_{at} end_{at}",
            f"head_{at}[lazy]: /{head}/",
            f"end_{at}: WS? json_{at} WS? \"}}\"",
            f"json_{at}: %json {json.dumps(schema)}",
            f"bare_{at}: bare_{at}_head end_{at}",
            f"bare_{at}_head[lazy]: /{BLANK}\\{{{WHITE}{head}/",
            f"bares_{at}: bares_{at}_head end_{at} (WS? \",\" WS? calls | WS? \"]\")",
            f"bares_{at}_head[lazy]: /{BLANK}\\[{WHITE}\\{{{WHITE}{head}/",
        ]
    said = "first? marked* TEXT"
    thinking = {None: said, False: f"{said} | opened (thought {said} | TEXT)", True: f"thought {said} | TEXT"}
    ends = ["TEXT: /(.|\\n)*/", f"BLANK: /{BLANK}/", "WS: /[ \\n]/"]
    return "\n".join(["%llguidance {}", f"start: {thinking[thinks]}", *rules, *ends])


BLANK = r"[\s\x1c-\x1f]*"  # what str.strip() takes away
TEXTS = {"TEXT ": r"(.|\n)*", "BLANK? ": BLANK, "": ""}


def _escaped(word: str) -> str:
    return re.sub(r"([^a-zA-Z0-9_<>])", r"\\\1", word)


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
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores [vocabulary] with -inf for tokens that cannot come next. Raises InvalidArgument where
        llguidance's bounds do not let it follow what came so far.
        """
        if self.over:
            return scores
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # of which the bits say that this is the end
            reason = self._matcher.get_error().partition("\n")[0]
            raise InvalidArgument(f"the schema cannot be followed any further: {reason}")
        allowed = torch.zeros(len(scores), dtype=torch.bool)
        known = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), len(scores)))
        allowed[: len(known)] = torch.from_numpy(known)
        return scores.masked_fill(~allowed, float("-inf"))

    def take(self, token: int) -> None:
        """The token was chosen. Raises RuntimeError if the grammar forbids it, InvalidArgument as mask()."""
        if not self.over and not self._matcher.consume_token(token):
            reason = self._matcher.get_error().partition("\n")[0]
            if any(bound in reason for bound in BOUNDS):
                raise InvalidArgument(f"the schema cannot be followed any further: {reason}")
            raise RuntimeError(f"token {token} was chosen although the grammar forbids it: {reason}")
