"""Calls of tools in what a model wrote: hermes' and qwen's tags, mistral's lists and names, llama's JSON,
tags and Python, qwen's parameters, plain JSON.

Owns the reading, of a text as it grows. Never runs a tool. Invariant: what is no call stays text; a call has
a name that was offered; the pieces of a text give what the whole gives, wherever they were cut.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Collection
from typing import Any

from kvclient.serve.http.spellings import FUNCTION_END, Parameters, behind, calls_in_python, kinds, valued

TAG, TAG_END = "<tool_call>", "</tool_call>"
LISTED = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
FUNCTION = "<function="  # llama's, and qwen's within its tag
ANYWHERE, AT_START = (TAG, LISTED, FUNCTION), (LLAMA, "{", "[")
WHITE = r"[ \t\n\r]*"  # in JSON
TYPED = f'("type"{WHITE}:{WHITE}"function"{WHITE},{WHITE})?'  # llama's begin so
NAME = rf'\{{{WHITE}(?:{TYPED})"name"{WHITE}:{WHITE}"(?P<name>[^"\\]+)"{WHITE},'
HEAD = re.compile(rf'{NAME}{WHITE}"(?:arguments|parameters)"{WHITE}:{WHITE}(?=\{{)')
IDENT, ARGS = "[CALL_ID]", "[ARGS]"  # between the name and the arguments of mistral's
WORD = re.compile(r"[a-zA-Z0-9_.-]{0,64}")
MOST_PYTHON, MOST_TRIES = 16 << 10, 64  # characters of calls in Python, and brackets at which they may end
FORCED = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\S)')


class ForcedCall:
    """A call that a grammar forces, as its text grows: {"name": …, "arguments": {…}}. Its arguments are told
    as they stand in the text, cut short where the text is.
    """

    def __init__(self) -> None:
        self._text, self._told, self.name = "", 0, ""

    def add(self, text: str, ended: bool = False) -> list[dict[str, Any]]:
        """Deltas. ended: nothing follows; a text that ended before its name did is no call, and is told."""
        out: list[dict[str, Any]] = [{"tool_calls": [call]} for call in self._calls(text, ended)]
        return [{"content": self._text}] if ended and self._text and not self.name else out

    def _calls(self, text: str, ended: bool) -> list[dict[str, Any]]:
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
    call = ForcedCall()
    pieces = [piece for delta in call.add(text, ended=True) for piece in delta.get("tool_calls", ())]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    return [_spelled(call.name, arguments)] if pieces else []


def _spelled(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class Value:
    """How far a JSON object or list reaches in a text that grows; None: not to its end yet."""

    def __init__(self, start: int) -> None:
        self._at, self._depth, self._quoted, self._escaped = start, 0, False, False
        self.end: int | None = None

    def look(self, text: str) -> int | None:
        """Where in the text the JSON value ends, counted from its start; None: not yet."""
        while self.end is None and self._at < len(text):
            letter, self._at = text[self._at], self._at + 1
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = not self._escaped and letter == "\\"
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                self.end = self._at if self._depth <= 0 else None
        return self.end


class SpokenCalls:
    """What a model says that may call tools, as its text grows: deltas of content and of tool_calls. A call's
    arguments are told as they are generated, once its name has been said and was offered; one that is spelled
    in another order is told when it is whole. most: calls that are told; those behind them are not shown.
    strict: of these no other order, as none but that is kept to a schema (grammar.calls_grammar).
    """

    def __init__(
        self, offered: Collection[str], most: int | None = None, strict: Collection[str] = ()
    ) -> None:  # fmt: skip
        self._offered, self._most, self._strict, self.count = offered, most, strict, 0
        self._free = False  # a call was read that the grammar of strict ones took for text, in a list
        self._held, self._at = "", 0  # what is not told, or may have to be; and how far that is read
        self._reads: Callable[[list[dict[str, Any]], bool], bool] = self._text
        self._started = False  # something but white space was met
        self._mark, self._listed = "", False
        self._object, self._start = Value(0), 0
        self._tries = self._tried = 0  # of a list in Python: brackets, and the letters up to the last
        self._arguments: Value | None = None
        self._named_so, self._of = "", Parameters(0)  # of a call whose parameters are being said

    def add(self, text: str, ended: bool = False) -> list[dict[str, Any]]:
        """ended: nothing follows."""
        self._held += text
        out: list[dict[str, Any]] = []
        while self._reads(out, ended):
            pass
        if self._most is None:
            return out
        return [delta for delta in out if all(c["index"] < self._most for c in delta.get("tool_calls", ()))]

    # Each reads on; True: another has its turn.

    def _text(self, out: list[dict[str, Any]], ended: bool) -> bool:
        blank = len(self._held) - len(self._held.lstrip())
        met = [(at, mark) for mark in ANYWHERE if (at := self._held.find(mark)) >= 0]
        if not self._started:
            met += [(blank, mark) for mark in AT_START if self._held.startswith(mark, blank)]
        if met:
            at, mark = min(met, key=lambda found: (found[0], -len(found[1])))
            if mark == "[" and LISTED.startswith(self._held[at:]) and not ended:
                return False
            before = self._held[:at].rstrip()  # white space before a call is not shown
            self._say(out, len(before))
            self._started, self._mark, self._listed = True, mark, mark == "["
            self._at = at - len(before) + len(mark) - (mark == "{")
            self._reads = self._opening
            return True
        told = len(self._held)
        if not ended:
            marks = ANYWHERE if self._started else (*ANYWHERE, LLAMA)
            near = next((n for n in range(len(LLAMA), 0, -1) if n <= told
                         and any(mark.startswith(self._held[-n:]) for mark in marks)), 0)  # fmt: skip
            told = len(self._held[: told - near].rstrip())
        self._say(out, told)
        return False

    def _opening(self, out: list[dict[str, Any]], ended: bool) -> bool:
        """Behind a mark: the object that follows."""
        next_one = self._skip(" \n\t\r")
        if next_one == "[" and self._mark == LISTED and not self._listed:
            self._listed, self._at = True, self._at + 1
            return True
        rest = self._held[self._at :]
        if self._mark == TAG and rest and (rest.startswith(FUNCTION) or FUNCTION.startswith(rest)):
            if not rest.startswith(FUNCTION):
                return self._no_call(out, self._at) if ended else False
            self._mark, self._at = FUNCTION, self._at + len(FUNCTION)
            return True
        if self._mark in (LISTED, FUNCTION) and not self._listed and next_one not in ("", "{", "["):
            return self._named(out, ended)
        if self._mark == "[" and self._listed and next_one.isidentifier():
            return self._python(out, ended)
        if next_one == "{" and self._mark != FUNCTION:
            self._object, self._start, self._arguments = Value(self._at), self._at, None
            self._reads = self._call_itself
            return True
        if next_one or ended:
            return self._no_call(out, self._at)
        return False

    def _call_itself(self, out: list[dict[str, Any]], ended: bool) -> bool:
        end = self._object.look(self._held)
        if self._arguments is None:
            head = HEAD.match(self._held, self._start)
            if head is not None and head["name"] in self._offered and self._kept(head["name"]):
                self._arguments, self._at = Value(head.end()), head.end()
                self._tell(out, _spelled(head["name"], ""))
        if self._arguments is not None:
            reached = self._arguments.look(self._held) or len(self._held)
            if reached > self._at:
                function = {"arguments": self._held[self._at : reached]}
                out.append({"tool_calls": [{"index": self.count - 1, "function": function}]})
                self._at = reached
        elif end is not None and (call := self._otherwise(self._held[self._start : end])) is not None:
            self._tell(out, call)
        elif end is not None or ended:
            return self._no_call(out, len(self._held) if end is None else end)
        if end is None:
            return False
        self._held, self._at, self._reads = self._held[end:], 0, self._closing
        return True

    def _named(self, out: list[dict[str, Any]], ended: bool) -> bool:
        """Behind a mark: a name, and then its arguments as an object, or as parameters. What is decided hangs
        on the letters up to where it is, and on none behind.
        """
        name = WORD.match(self._held, self._at)
        assert name is not None
        between = ((">", ""),) if self._mark == FUNCTION else ((IDENT, r"\w{1,64}"), (ARGS, ""))
        at = behind(self._held, name.end(), between, self._mark == FUNCTION)
        if at is None and not ended and name[0]:
            return False
        known = at is not None and name[0] in self._offered and name[0] not in self._strict
        if not known or at is None:
            return self._no_call(out, self._at)
        if self._held[at] == "<" and self._mark == FUNCTION:
            self._named_so, self._of = name[0], Parameters(at)
            self._reads = self._parameters
            return True
        if self._held[at] != "{":
            return self._no_call(out, self._at)
        self._object, self._arguments, self._start, self._at = Value(at), Value(at), at, at
        self._tell(out, _spelled(name[0], ""))
        self._reads = self._call_itself
        return True

    def _parameters(self, out: list[dict[str, Any]], ended: bool) -> bool:
        """Of qwen's, each in tags of its own: told when all are there. Where they are none, or not to their
        end, nothing that stands in a value is a call.
        """
        whole = self._of.look(self._held)
        if whole is None and not ended:
            return False
        if not whole:
            return self._no_call(out, len(self._held) if whole is None else self._of.at)
        types = kinds(self._offered, self._named_so)
        told = {key: valued(text, types.get(key, ("string",))) for key, text in self._of.told}
        self._tell(out, _spelled(self._named_so, json.dumps(told)))
        self._held, self._at, self._reads = self._held[self._of.at :], 0, self._closing
        return True

    def _python(self, out: list[dict[str, Any]], ended: bool) -> bool:
        """Llama's [name(key=value)], told when its list is whole: at one of its brackets."""
        start, name = self._at, WORD.match(self._held, self._at)
        assert name is not None
        if name.end() == len(self._held) and not ended:
            return False
        called = self._held.startswith("(", name.end()) and name[0] in self._offered
        while called and self._tries < MOST_TRIES and (end := self._held.find("]", self._tried)) >= 0:
            if end > start + MOST_PYTHON:
                break
            self._tries, self._tried = self._tries + 1, end + 1
            calls = calls_in_python(f"[{self._held[start : end + 1]}")
            if calls and all(name in self._offered and name not in self._strict for name, _ in calls):
                for told in calls:
                    self._tell(out, _spelled(*told))
                self._held, self._at, self._mark, self._listed = self._held[end + 1 :], 0, "", False
                self._tries, self._tried, self._reads = 0, 0, self._closing
                return True
        open_yet = self._tries < MOST_TRIES and len(self._held) <= start + MOST_PYTHON
        if called and open_yet and not ended:
            return False
        self._tries = self._tried = 0
        return self._no_call(out, start)

    def _closing(self, out: list[dict[str, Any]], ended: bool) -> bool:
        """Behind a call: another in its list, the end of its mark, or text."""
        next_one = self._skip(" \n\t\r")
        ends = {TAG: TAG_END, FUNCTION: FUNCTION_END, FUNCTION_END: TAG_END}
        rest, closing = self._held[self._at :], ends.get(self._mark, "]" if self._listed else "")
        if self._listed and next_one == ",":
            self._at, self._reads, self._mark = self._at + 1, self._opening, "["
            return True
        if not ended and (not rest or (closing.startswith(rest) and rest != closing)):
            return False
        done = len(closing) if closing and rest.startswith(closing) else 0
        within = done and self._mark == FUNCTION  # in a tag, perhaps
        self._held, self._at, self._mark = self._held[self._at + done :], 0, FUNCTION_END if within else ""
        self._listed = self._free = False
        if done:
            self._reads = self._closing
            return True
        self._reads = self._text
        return bool(self._held)

    def _kept(self, name: str) -> bool:
        return not (self._free and name in self._strict)

    def _otherwise(self, text: str) -> dict[str, Any] | None:
        call = _parsed(text, self._offered)
        if call is None or call["function"]["name"] in self._strict:
            return None
        self._free = bool(self._listed)
        return call

    def _no_call(self, out: list[dict[str, Any]], end: int) -> bool:
        """What is held is text, up to there."""
        self._say(out, end)
        self._reads = self._text
        return bool(self._held)

    def _say(self, out: list[dict[str, Any]], count: int) -> None:
        if count:
            self._started = True
            out.append({"content": self._held[:count]})
        self._held = self._held[count:]

    def _tell(self, out: list[dict[str, Any]], call: dict[str, Any]) -> None:
        out.append({"tool_calls": [{"index": self.count, **call}]})
        self.count += 1

    def _skip(self, letters: str) -> str:
        """The next letter that is none of these; "": there is none yet."""
        while self._held[self._at : self._at + 1] and self._held[self._at] in letters:
            self._at += 1
        return self._held[self._at : self._at + 1]


def calls_in(
    text: str, offered: Collection[str], most: int | None = None, strict: Collection[str] = ()
) -> tuple[str, list[dict[str, Any]]]:
    """(the text beside them, the calls as OpenAI's tool_calls) of a whole text, as SpokenCalls reads it."""
    beside, calls = "", list[dict[str, Any]]()
    for delta in SpokenCalls(offered, most, strict).add(text, ended=True):
        beside += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({name: value for name, value in call.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return beside, calls


def _parsed(text: str, offered: Collection[str]) -> dict[str, Any] | None:
    try:
        return _call(json.loads(text), offered)
    except ValueError:
        return None


def _call(found: Any, offered: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(found, dict) or found.get("name") not in offered:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return _spelled(found["name"], spelled)
