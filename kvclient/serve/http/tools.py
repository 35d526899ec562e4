"""Calls of tools in what a model wrote: hermes' and qwen's tags, mistral's list, llama's and plain JSON.

Owns the reading. Never runs a tool. Invariant: what is no call stays text; a call has a name that was
offered.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Collection
from typing import Any

TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
LISTED = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
FORCED = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\S)')


class ForcedCall:
    """A call that a grammar forces, as its text grows: {"name": …, "arguments": {…}}. Its arguments are told
    as they stand in the text, cut short where the text is.
    """

    def __init__(self) -> None:
        self._text, self._told, self.name = "", 0, ""

    def add(self, text: str, ended: bool = False) -> list[dict[str, Any]]:
        """Deltas of tool_calls. ended: nothing follows."""
        self._text += text
        out: list[dict[str, Any]] = []
        if not self.name:
            met = FORCED.match(self._text)
            if met is None:
                return out
            self.name, self._told = met[1], met.end()
            out.append({"index": 0, **_spelled(self.name, "")})
        # What closes at the end may be the arguments' or what holds them: shown once more follows, or all is.
        shown = len(self._text.rstrip("} \n"))
        if ended:
            shown = len(self._text)
            with contextlib.suppress(ValueError):
                json.loads(self._text)
                shown = len(self._text.rstrip().removesuffix("}").rstrip())
        if shown > self._told:
            out.append({"index": 0, "function": {"arguments": self._text[self._told : shown]}})
            self._told = shown
        return out


def forced_call(text: str) -> list[dict[str, Any]]:
    """The same of a whole text, as OpenAI's tool_calls; empty where it ended before the name did."""
    own = ForcedCall()
    deltas = own.add(text, ended=True)
    arguments = "".join(delta["function"]["arguments"] for delta in deltas)
    return [_spelled(own.name, arguments)] if deltas else []


def _spelled(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def calls_in(text: str, offered: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
    """(the text beside them, the calls as OpenAI's tool_calls)."""
    stripped = text.strip()
    if LISTED in text:
        before, _, listed = text.partition(LISTED)
        found = _objects(listed)
    elif TAGGED.search(text):
        before, found = TAGGED.sub("", text), [o for m in TAGGED.finditer(text) for o in _objects(m[1])]
    elif stripped.startswith((LLAMA, "{", "[")):
        before, found = "", _objects(stripped.removeprefix(LLAMA))
    else:
        return text, []
    calls = [call for one in found if (call := _call(one, offered)) is not None]
    return (before.strip(), calls) if calls else (text, [])


def _objects(text: str) -> list[Any]:
    try:
        parsed, _ = json.JSONDecoder().raw_decode(text.strip())
    except ValueError:
        return []
    return parsed if isinstance(parsed, list) else [parsed]


def _call(found: Any, offered: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(found, dict) or found.get("name") not in offered:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return _spelled(found["name"], spelled)
