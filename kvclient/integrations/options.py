"""What a user writes into an engine's own configuration for our part of it.

Owns the check that no name is misspelt and that a value is of its default's kind and within bounds, and the
client of what every engine's part is told alike; never a default. Invariants: an unknown name stops the
start, for an option that is silently ignored is a cache that silently never hits; no number leaves here that
is none (nan), without an end, or below zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import kvclient
from kvclient.errors import InvalidArgument, Unavailable

MAX_SECONDS = 86_400.0
MAX_COUNT = 1 << 31


def connected(options: Mapping[str, Any]) -> Any:
    """A client for an engine, by `dir`, `namespace`, `timeout_s`: what the daemon cannot do is a miss. Raises
    what kvclient.connect() raises, but Unavailable only for a directory where no daemon can ever be: a store
    that is away counts as empty.
    """
    _check_can_come(options["dir"])
    return kvclient.connect(
        options["dir"],
        options["namespace"],
        on_error="miss",
        timeout_s=float(options["timeout_s"]),
        owner="engine",
    )


def _check_can_come(directory: str | None) -> None:
    """A daemon makes its directory, and whatever is missing of the way there; a file it leaves alone."""
    if directory is None:
        return
    place = Path(os.path.expanduser(directory)).absolute()
    for part in (place, *place.parents):  # what this user may not see is nothing here: connect() says it
        if os.path.isdir(part):  # Path.is_dir() raises PermissionError
            return
        if os.path.exists(part):
            raise Unavailable(f"dir={directory!r}: {part} is no directory, so no daemon can be there")


def with_defaults(
    chosen: Mapping[str, Any], defaults: Mapping[str, Any], where: str, also: Iterable[str] = ()
) -> dict[str, Any]:
    """The defaults beneath what was given; `also` names what belongs to the engine and is left out. A default
    that is a number, a truth or a text says what the value must be. Raises InvalidArgument for an unknown
    name, and for a value of another kind or beyond the bounds.
    """
    engines = set(also)
    if unknown := sorted(set(chosen) - set(defaults) - engines):
        raise InvalidArgument(f"{where} has {', '.join(unknown)}; known are {', '.join(defaults)}")
    said = {
        name: _checked(where, name, value, defaults[name])
        for name, value in chosen.items()
        if name not in engines
    }
    return {**defaults, **said}


def _checked(where: str, name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):  # the text "false" would be true
            raise InvalidArgument(f"{where}: {name}={value!r}; it must be true or false")
        return value
    if isinstance(value, os.PathLike):  # of a configuration made in Python
        value = os.fspath(value)
    if default is None and not isinstance(value, str | None):
        raise InvalidArgument(f"{where}: {name}={value!r}; it must be a text")
    if not isinstance(default, int | float):
        return value
    kind, most = (int, MAX_COUNT) if isinstance(default, int) else (float, MAX_SECONDS)
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or not 0 <= number <= most or number != float(value):
        raise InvalidArgument(f"{where}: {name}={value!r}; it must be a number of 0 to {most:g}")
    return number
