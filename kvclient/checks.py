"""Bounds of arguments: what is out of them is an InvalidArgument that names the value and the limit.

Owns the three rules that every public function shares. Never knows what a value is for.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

from kvclient.errors import InvalidArgument

MAX_TTL_S = 10 * 366 * 86_400.0
MOST_NODE_BYTES = 63  # of a host's name


def check_bounds(what: str, value: int, low: int, high: int) -> None:
    """Raises InvalidArgument that names the value and the limit."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{what}={value!r}; it must be an integer in {low}..{high}")


def check_real(what: str, value: float, low: float, high: float) -> None:
    """The same of a number that need not be whole. Raises InvalidArgument outside of low..high."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{what}={value!r}; it must be a number in {low}..{high}")


def whole_seconds(ttl_s: float | None) -> int:
    """Seconds to live as the daemon counts them, rounded up; 0 is for ever. Raises InvalidArgument."""
    if ttl_s is None:
        return 0
    if not isinstance(ttl_s, Real) or not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidArgument(f"ttl_s={ttl_s!r}; it must be None or above 0 and at most {MAX_TTL_S}")
    return math.ceil(ttl_s)
