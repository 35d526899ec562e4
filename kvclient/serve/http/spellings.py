"""Parts of the ways in which models spell calls: what stands behind a name, parameters in tags of their own,
calls in Python.

Owns their reading, each of one text. Never decides what is a call. Invariant: what a model wrote is read and
never run.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

WHITE_SPACE = re.compile(r"[ \t\r\n]*")
FUNCTION_END = "</function>"
BEGIN, END = "<parameter=", "</parameter>"  # of a parameter
LONGEST = 200  # letters of its name
OPENS = re.compile(rf"{BEGIN}([^<>\n]{{1,{LONGEST}}})>")
MARKS = re.compile(f"{END}|{OPENS.pattern}")
WORDS = {"true": True, "false": False, "null": None}


def behind(text: str, at: int, marks: Sequence[tuple[str, str]], all_there: bool) -> int | None:
    """Where in a text the first letter behind these marks is that is no white space, each with what may stand
    behind it; of which all are wanted, or any. None: it may come yet. Where a mark is none, there.
    """
    for mark, more in marks:
        rest = text[at : at + len(mark)]
        if rest == mark:
            at += len(mark)
            met = re.compile(more).match(text, at)
            at = met.end() if met else at
        elif mark.startswith(rest):
            return None
        elif all_there:
            return at
    blank = WHITE_SPACE.match(text, at)
    assert blank is not None
    return None if blank.end() == len(text) else blank.end()


class Parameters:
    """Of a call of qwen's, each in tags of its own, in a text that grows: read once, from its start on. What
    ends one ends it only in front of the next or of the call's end, and stands in its value else. One that is
    opened within a value, a tag or words between two: these are no parameters.
    """

    def __init__(self, start: int) -> None:
        self.at, self.told = start, list[tuple[str, str]]()
        self._name: str | None = None  # of the one that is open
        self._start, self._end = 0, -1  # of its value; where it may end

    def look(self, text: str) -> bool | None:
        """Whether the call's end stands behind them, at `at`; False: they are none, which shows there. None:
        not to be said yet.
        """
        while True:
            if self._name is not None and self._end < 0:
                met = MARKS.search(text, self.at)
                if met is None:  # the next may have begun
                    self.at = max(self.at, len(text) - len(BEGIN) - LONGEST)
                    return None
                if met[1] is not None:
                    self.at = met.start()
                    return False
                self._end, self.at = met.start(), met.end()
            blank = WHITE_SPACE.match(text, self.at)
            assert blank is not None
            opened = OPENS.match(text, blank.end())
            if opened is None and not text.startswith(FUNCTION_END, blank.end()):
                if _may_follow(text[blank.end() : blank.end() + len(BEGIN) + LONGEST + 1]):
                    self.at = blank.end() if self._name is None else self.at
                    return None
                if self._name is None:
                    self.at = blank.end()
                    return False
                self._end = -1  # it stood in the value
                continue
            if self._name is not None:
                value = text[self._start : self._end].removeprefix("\n").removesuffix("\n")
                self.told.append((self._name, value))
            self.at, self._name, self._end = blank.end(), None, -1
            if opened is None:
                return True
            self._name, self._start, self.at = opened[1], opened.end(), opened.end()


def _may_follow(rest: str) -> bool:
    """Whether this, at a text's end, may become the next parameter's tag, or the call's end."""
    if BEGIN.startswith(rest) or FUNCTION_END.startswith(rest):
        return True
    return rest.startswith(BEGIN) and len(rest) <= len(BEGIN) + LONGEST and not set("<>\n") & set(rest[1:])


def kinds(offered: Collection[str], name: str) -> dict[str, set[str]]:
    """The types of a tool's parameters, as its schema has them; offered: by name, or names alone."""
    schema = offered.get(name) if isinstance(offered, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.items() if isinstance(properties, dict) else ()
    return {key: _types(part) for key, part in found}


def _types(schema: Any, deep: int = 4) -> set[str]:
    """All that it may be; of a part whose type is not said, text. deep: schemas within each other."""
    if not isinstance(schema, dict) or not deep:
        return {"string"}
    kind, parts = schema.get("type"), [*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))]
    if kind is None and parts:
        return set().union(*(_types(part, deep - 1) for part in parts))
    each_kind = kind if isinstance(kind, list) else [kind]
    return {each for each in each_kind if isinstance(each, str)} or {"string"}


def _listed(parts: Any) -> list[Any]:
    return parts if isinstance(parts, list) else []


def valued(text: str, types: Collection[str]) -> Any:
    """A parameter that came as text, of one of these types: text where it may be, and null where that may be
    and is said; of others JSON, or Python's words, and text where it is neither.
    """
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _finite(number: str) -> float:
    """Raises ValueError for one that JSON cannot have."""
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number of JSON's")
    return value


def calls_in_python(text: str) -> list[tuple[str, str]]:
    """(name, arguments in JSON) of each call in a list of calls with named arguments alone; else none."""
    try:
        made: Any = ast.parse(text, mode="eval").body
        calls = made.elts if isinstance(made, ast.List) else []
        return [(ast.unparse(call.func), json.dumps(_told(call), allow_nan=False)) for call in calls]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return []


def _told(call: Any) -> dict[str, Any]:
    """Its arguments. Raises ValueError for what is no call with named ones, or no plain value."""
    if call.args or any(word.arg is None for word in call.keywords):
        raise ValueError("arguments without names")
    out = {}
    for word in call.keywords:
        plain = getattr(word.value, "id", None)
        out[word.arg] = WORDS[plain] if plain in WORDS else ast.literal_eval(word.value)
    return out
