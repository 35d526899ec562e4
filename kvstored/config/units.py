"""Sizes and durations as people write them: `4GiB`, `64 MiB`, `1000000`. Parses and prints; knows no field
and no limit."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
MAX_NUMBER = (1 << 63) - 1  # a file may write more, and Python shows no number of thousands of digits
TOO_LARGE = f"a number of at most {MAX_NUMBER} is wanted"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes. Raises ValueError for what is no size."""
    if isinstance(text, int) and not isinstance(text, bool):
        return _bounded(text)
    match = _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size: write a number of bytes or, for example, 512MiB, 4GiB")
    number = match.group(1)
    return _bounded(int(number) * factor if number.isdigit() else int(float(number) * factor))


def _bounded(number: int) -> int:
    if abs(number) > MAX_NUMBER:
        raise ValueError(TOO_LARGE)
    return number


def format_size(size_bytes: int) -> str:
    """The exact size in the largest binary unit that divides it: parse_size gives the same number back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _FACTORS[unit.upper()]
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def approximate_size(size_bytes: int) -> str:
    """For people: three digits and a unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _FACTORS[unit.upper()]
        if size_bytes >= factor:
            value = size_bytes / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{size_bytes} B"


def format_duration(seconds: float) -> str:
    """For people: the two largest units."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    if minutes:
        return f"{minutes}m {whole % 60}s"
    return f"{seconds:.1f}s"
