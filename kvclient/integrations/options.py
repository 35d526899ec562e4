"""What a user writes into an engine's own configuration for our part of it.

Owns the check that no name is misspelt; never a default. Invariant: an unknown name stops the start, for an
option that is silently ignored is a cache that silently never hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvclient.errors import InvalidArgument


def with_defaults(
    chosen: Mapping[str, Any], defaults: Mapping[str, Any], where: str, also: Iterable[str] = ()
) -> dict[str, Any]:
    """The defaults beneath what was given; `also` names what belongs to the engine and is left out. Raises
    InvalidArgument for an unknown name.
    """
    engines = set(also)
    if unknown := sorted(set(chosen) - set(defaults) - engines):
        raise InvalidArgument(f"{where} has {', '.join(unknown)}; known are {', '.join(defaults)}")
    return {**defaults, **{name: value for name, value in chosen.items() if name not in engines}}
