"""Where a program's settings come from: a file, below the environment, below its flags.

Owns that order. Never reads a setting's meaning. Invariant: a value is checked the same way wherever it
stands, and one that is wrong ends the program with 2 and says where it stood.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ALIKE = 0.8  # of difflib: MAX_QEUE is MAX_QUEUE; PORT and Kubernetes' SERVICE_PORT are two names
SERVICE = re.compile(r"(tcp|udp|sctp)://\S+")  # what Kubernetes calls <NAME>_PORT, of a Service of that name
YES, NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def parse(made: argparse.ArgumentParser, prefix: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """made: with a `--config FILE` of its own making here. prefix: of the environment's names, as
    KVCLIENT_SERVE_. The file is TOML, with the flags' names, `-` or `_`; a list where a flag may be repeated.
    """
    made.add_argument("--config", type=Path, help=f"TOML with these names; {prefix}<NAME> and flags win")
    actions = {a.dest: a for a in made._actions if a.option_strings and a.dest != "help"}
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    known, _ = before.parse_known_args(argv)
    path = known.config or os.environ.get(f"{prefix}CONFIG")
    below: dict[str, Any] = {}  # its flags
    for name, value in (_file(made, path) if path else {}).items():
        dest = name.replace("-", "_")
        if dest not in actions or dest == "config":
            made.error(f"{path}: {name} is no setting; there are {', '.join(sorted(actions))}")
        below[dest] = _value(made, actions[dest], value, f"{path}: {name}")
    _near(made, prefix, actions)
    for dest, action in actions.items():
        name = prefix + dest.upper()
        text = os.environ.get(name)
        if dest != "config" and text is not None and not SERVICE.fullmatch(text):
            words: Any = text.split() if isinstance(action, argparse._AppendAction) else text
            below[dest] = _value(made, action, words, name)
    # A flag that may be repeated would be added to what stands below it.
    lists = {dest: value for dest, value in below.items() if isinstance(value, list)}
    made.set_defaults(**{dest: value for dest, value in below.items() if dest not in lists})
    chosen = made.parse_args(argv)
    for dest, value in lists.items():
        setattr(chosen, dest, getattr(chosen, dest) or value)
    return chosen


def _near(made: argparse.ArgumentParser, prefix: str, known: Iterable[str]) -> None:
    """A variable that is nearly a setting's is refused, as the daemon does; any other may be somebody
    else's.
    """
    import difflib

    for name in sorted(name for name in os.environ if name.startswith(prefix)):
        dest = name.removeprefix(prefix).lower()
        for near in [] if dest in known else difflib.get_close_matches(dest, known, 1, ALIKE):
            made.error(f"{name} is no setting; the nearest is {prefix}{near.upper()}")


def _file(made: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        made.error(f"--config {path}: {error}")


def _value(made: argparse.ArgumentParser, action: argparse.Action, value: Any, place: str) -> Any:
    if isinstance(action, argparse._AppendAction):
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            made.error(f"{place}={value!r}; a list of texts is wanted")
        return value
    if isinstance(action, argparse._StoreTrueAction):
        if (text := str(value).lower()) not in YES | NO:
            made.error(f"{place}={value!r}; it must be true or false")
        return text in YES
    try:
        out = action.type(str(value)) if callable(action.type) else str(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        made.error(f"{place}={value!r}: {error}")
    if action.choices is not None and out not in action.choices:
        made.error(f"{place}={value!r}; it must be one of {', '.join(map(str, action.choices))}")
    return out
