"""What is wrong with an argument, said so that the next try is right.

Owns the parser's words: the nearest flag or command, and the usage of the command that was meant. Never ends
the program: main() does, which knows whether JSON is wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

# What other programs call it.
OTHER_WORDS = {
    "delete": "rm", "gc": "pools", "get": "describe", "info": "status", "kill": "stop", "list": "ls",
    "remove": "rm", "run": "serve", "show": "describe", "start": "serve", "stats": "status",
}  # fmt: skip
ALIKE = 0.6  # of difflib


class WrongArguments(Exception):
    """The text, and the usage of the command that was meant."""

    def __init__(self, text: str, usage: str) -> None:
        super().__init__(text)
        self.usage = usage


def nearest(word: str, known: Iterable[str]) -> str:
    """`; the nearest is …`, or nothing."""
    import difflib  # most commands are typed well

    listed = list(known)
    found = [OTHER_WORDS[word]] if word in OTHER_WORDS else difflib.get_close_matches(word, listed, 1, ALIKE)
    found = found or [name for name in listed if word and name.startswith(word)][:1]
    return f"; the nearest is {found[0]}" if found else ""


class Parser(argparse.ArgumentParser):
    """argparse's, with nearer words. A command's parser says itself what it does not know: otherwise the
    usage shown would be the whole program's. A flag is written whole: a part of one may be another's
    tomorrow."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                flags = [text for action in self._actions for text in action.option_strings]
                name = word.partition("=")[0]
                self.error(f"unknown flag {name}{nearest(name, flags) or self._where()}")
            self.error(f"one argument too many: {word!r}")
        return found, unknown

    def _where(self) -> str:
        return f"; {self.prog} --help lists them"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        near = nearest(str(value), known) or f"; known are {', '.join(known)}"
        raise argparse.ArgumentError(None, f"unknown {what} {value!r}{near}")

    def error(self, message: str) -> NoReturn:
        raise WrongArguments(message, self.format_usage().strip())


def wants_json(arguments: Sequence[str]) -> bool:
    """Before the arguments are understood."""
    return "--json" in arguments


def key(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no key: 64 hexadecimal digits are wanted")
    return found


def prefix(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no prefix: an even number of hexadecimal digits is wanted"
        ) from None


def bounded(low: float, high: float, kind: type = int) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of bounds, {low} to {high}")
        return value

    return parse
