"""The one thing that tests in several processes share: the machine.

`make test` runs files side by side (pytest-xdist). A test marked `alone` changes or counts what belongs to
the whole host, so it runs while no other test does: the others hold the room shared, it holds it exclusively.
Everybody passes a door first, which whoever wants to be alone keeps shut while it waits; else a room that is
never empty would never be its. The locks are flock on two files of the checkout: a process that dies gives
them back, nothing is made and nothing stays. Unlocked by name, not by closing: forked children have copies.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

DOOR = Path(__file__).resolve()
ROOM = DOOR.parent / "conftest.py"


@contextlib.contextmanager
def turn(alone: bool, door_path: Path = DOOR, room_path: Path = ROOM) -> Iterator[None]:
    """The caller's test runs: beside others that are not alone, or by itself."""
    with open(door_path) as door, open(room_path) as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        try:
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)
