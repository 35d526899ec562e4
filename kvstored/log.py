"""One way to log: one line per event on standard error, `time level event key=value ...`.

Owns the level. Never writes a block's key, a salt, a token or a tenant's name of a prompt: callers pass
counts, sizes and durations. Under systemd (JOURNAL_STREAM) the time is left out, since the journal has its
own.
"""

from __future__ import annotations

import os
import sys
import time

LEVELS = ("debug", "info", "warning", "error")

_threshold = LEVELS.index("info")
_with_time = "JOURNAL_STREAM" not in os.environ


def set_level(level: str) -> None:
    global _threshold
    _threshold = LEVELS.index(level)


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and not any(c in text for c in ' "=\n\r\t\\') and text.isprintable():
        return text
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def line(level: str, event: str, fields: dict[str, object]) -> str:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z "
    pairs = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
    return f"{stamp if _with_time else ''}{level} {event}{pairs}\n"


def _write(level: str, event: str, fields: dict[str, object]) -> None:
    if LEVELS.index(level) < _threshold:
        return
    try:
        # One write call, so that lines of several threads never mix.
        os.write(sys.stderr.fileno(), line(level, event, fields).encode())
    except (OSError, ValueError, AttributeError):
        pass  # a log that cannot be written must not stop the store


def debug(event: str, **fields: object) -> None:
    _write("debug", event, fields)


def info(event: str, **fields: object) -> None:
    _write("info", event, fields)


def warning(event: str, **fields: object) -> None:
    _write("warning", event, fields)


def error(event: str, **fields: object) -> None:
    _write("error", event, fields)
