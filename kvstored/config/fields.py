"""What a field of the configuration is made of: its description, and how a value of each kind is read.

Owns the readers of single values. Never knows a field's name or bounds. Invariant: a reader returns a value
of its kind or raises ValueError.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import field
from itertools import permutations
from typing import Any

from kvstored.config.units import MAX_NUMBER, TOO_LARGE

MAX_DISK_DIRS = 16


def described(
    doc: str,
    default: Any,
    parse: Callable[[Any], Any],
    *,
    unit: str = "",
    low: Any = None,
    high: Any = None,
    choices: tuple[str, ...] = (),
    show: Callable[[Any], str] = str,
) -> Any:
    about = {
        "doc": doc,
        "parse": parse,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": choices,
        "show": show,
    }
    return field(default=default, metadata=about)


def text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("a text is wanted")
    try:
        value.encode()  # gRPC and the native part want it; Python takes an environment of any bytes
    except UnicodeEncodeError:
        raise ValueError("UTF-8 is wanted") from None
    return value


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("a whole number is wanted")
    try:
        number = int(value)
    except ValueError:
        raise ValueError("a whole number is wanted") from None
    if abs(number) > MAX_NUMBER:
        raise ValueError(TOO_LARGE)
    return number


def yes(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in ("yes", "no", "true", "false"):
        raise ValueError("yes or no is wanted")
    return word in ("yes", "true")


def seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number of seconds is wanted")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise ValueError("a number of seconds is wanted")
    return number


def path(value: Any) -> str:
    return os.path.abspath(os.path.expanduser(text(value))) if text(value) else ""


def directories(value: Any) -> tuple[str, ...]:
    listed = value
    if isinstance(value, str):
        listed = [part for entry in value.split(",") if (part := entry.strip())]
    if not isinstance(listed, (list, tuple)):
        raise ValueError("a list of directories is wanted")
    found = tuple(path(text) for text in listed)
    if len(found) > MAX_DISK_DIRS or len(set(found)) != len(found) or "" in found:
        raise ValueError(f"{len(found)} directories: at most {MAX_DISK_DIRS}, each once")
    for inner, outer in permutations(found, 2):
        if os.path.commonpath((inner, outer)) == outer:
            raise ValueError(f"{inner!r} lies in {outer!r}, whose files are the tier's own")
    return found
