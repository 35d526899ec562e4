"""The trips of docs/tour.md as they happen: which Python files of this repository a call passes, in order.

Owns the recorder and the section of the page that is made from it. Never lists a file by hand. Invariant: a
file counts when one of its functions is called, in the order of the first calls; importing it is no call.
"""

import contextlib
import inspect
import json
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/tour.md"
OPENS = "<!-- made by: pytest tests/unit/tour/test_trips.py, with WRITE_TRIPS=1 -->\n"
CLOSES = "<!-- end of what is made -->\n"
STORE = f"{ROOT}/kvclient/testing/"  # stands for the daemon
OURS = tuple(f"{ROOT}/{package}/" for package in ("kvclient", "kvstored"))


@contextlib.contextmanager
def recorded(within: str = "") -> Iterator[list[str]]:
    """The files, as `path:function` of each first call. within: only of calls below a function so named, as
    `path:function`, itself included. What the in-memory store calls is below the client, and not counted.
    """
    files: dict[str, str] = {}
    names: dict[Any, str] = {}
    depth, below = 0 if within else 1, 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal depth, below
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(OURS):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
            return  # a module or a class that is being made, or a part of a function
        if code not in names:
            names[code] = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        if code.co_filename.startswith(STORE):
            below += 1 if event == "call" else -1
            return
        if names[code] == within:
            depth += 1 if event == "call" else -1
        if event == "call" and depth > 0 and not below:
            files.setdefault(code.co_filename, names[code])

    trip: list[str] = []
    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield trip
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        trip += files.values()


def section(trips: Mapping[str, list[str]]) -> str:
    """That part of the page: a heading and a numbered list for each trip."""
    parts = [OPENS]
    for name, files in trips.items():
        steps = [f"{number}. `{call}`" for number, call in enumerate(files, 1)]
        parts.append("\n".join([f"\n### {name}: {len(files)} file{'s' * (len(files) != 1)}\n", *steps, ""]))
    return "".join([*parts, "\n", CLOSES])


def written() -> str:
    """What the page has now."""
    _, _, behind = PAGE.read_text().partition(OPENS)
    return OPENS + behind.partition(CLOSES)[0] + CLOSES


def write(trips: Mapping[str, list[str]]) -> None:
    page = PAGE.read_text()
    PAGE.write_text(page.replace(written(), section(trips)))


def serve(out: str) -> None:
    """`kvstored` as a command, in this process; `out` gets the trip as far as READY=1."""
    from kvstored import server

    notify = server.notify

    def until_ready(message: str, *rest: Any) -> bool:
        if message.startswith("READY=1"):
            stack.close()
            Path(out).write_text(json.dumps(trip))
        return notify(message, *rest)

    server.notify = until_ready
    with contextlib.ExitStack() as stack:
        trip = stack.enter_context(recorded())
        runpy.run_module("kvstored", run_name="__main__")


if __name__ == "__main__":
    path = sys.argv[1]
    del sys.argv[1:4]  # it, and `-m kvstored`
    serve(path)
