"""Parts of the ways in which models spell calls: what stands behind a name, parameters in tags of their own,
calls in Python.

Owns their reading, each of one text. Never decides what is a call. Invariant: what a model wrote is read and
never run.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

WHITE_SPACE = re.compile(r"[ \t\r\n]*")
PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?(.*?)\n?</parameter>", re.DOTALL)
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


def kinds(offered: Collection[str], name: str) -> dict[str, Any]:
    """The types of a tool's parameters, as its schema has them; offered: by name, or names alone."""
    schema = offered.get(name) if isinstance(offered, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.items() if isinstance(properties, dict) else ()
    return {key: part.get("type") for key, part in found if isinstance(part, dict)}


def valued(text: str, kind: Any) -> Any:
    """A parameter that came as text, by its schema's type: one that is no text is JSON, or Python's words."""
    if kind in (None, "string"):
        return text
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)


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
