"""One way to log: one line per event on standard error, `time level event key=value ...`.

Owns the level. Never writes a block's key, a salt, a token or a tenant's name of a prompt: callers pass
counts, sizes and durations. Where standard error is the journal (JOURNAL_STREAM) the time is left out, since
the journal has its own. Never waits: what nobody reads is left out and counted, because the event loop logs.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time

LEVELS = ("debug", "info", "warning", "error")

MAX_LINE_BYTES = select.PIPE_BUF  # a pipe that has room at all takes so much whole

_threshold = LEVELS.index("info")
_writing = threading.Lock()
_lost = 0  # lines since the last that was written


def _is_journal() -> bool:
    """systemd's word for it is inherited by whatever it starts, also with standard error elsewhere."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


_with_time = not _is_journal()


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
    global _lost
    if LEVELS.index(level) < _threshold:
        return
    text = line(level, event, fields)
    with _writing:
        try:
            stream = sys.stderr.fileno()
            if not select.select((), (stream,), (), 0)[1]:
                _lost += 1
                return
            if _lost:
                text = line("warning", "log_lines_lost", {"count": _lost}) + text
            data = text.encode()
            if len(data) > MAX_LINE_BYTES:
                data = data[: MAX_LINE_BYTES - 1] + b"\n"
            os.write(stream, data)  # one call, so that lines of several processes never mix
            _lost = 0
        except (OSError, ValueError, AttributeError):
            _lost += 1  # a log that cannot be written must not stop the store


def debug(event: str, **fields: object) -> None:
    _write("debug", event, fields)


def info(event: str, **fields: object) -> None:
    _write("info", event, fields)


def warning(event: str, **fields: object) -> None:
    _write("warning", event, fields)


def error(event: str, **fields: object) -> None:
    _write("error", event, fields)
