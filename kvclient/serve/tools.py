"""Calls of tools in what a model wrote: hermes' and qwen's tags, mistral's list, llama's and plain JSON.

Owns the reading. Never runs a tool. Invariant: what is no call stays text; a call has a name that was
offered.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
LISTED = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"


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
    function = {"name": found["name"], "arguments": spelled}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
