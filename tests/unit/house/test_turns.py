"""Goal: tests run beside each other, one marked `alone` beside none, and it is not kept waiting by those that
come behind it; files that wait begin beside files that compute. Method: turns over files of this test, taken
by threads: flock knows no difference; the order of made-up files.
"""

import contextlib
import fcntl
import threading
from itertools import groupby
from types import SimpleNamespace

from tests.fault.children import eventually
from tests.order import pytest_collection_modifyitems
from tests.turns import turn


def is_free(path, how: int) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_one_alone_waits_for_those_inside_and_holds_up_those_behind(tmp_path):
    door, room = tmp_path / "door", tmp_path / "room"
    door.touch()
    room.touch()
    inside, leave = threading.Event(), threading.Event()

    def alone() -> None:
        with turn(True, door, room):
            inside.set()
            leave.wait(60)

    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        for stack in (first, second):
            stack.enter_context(turn(False, door, room))
        assert is_free(door, fcntl.LOCK_EX) and is_free(room, fcntl.LOCK_SH), "a third may come"
        waiting = threading.Thread(target=alone)
        waiting.start()
        eventually(lambda: not is_free(door, fcntl.LOCK_EX), "it waits, and nobody passes it")
        first.close()
        assert not inside.is_set(), "the second is still there"
    assert inside.wait(60)
    assert not is_free(room, fcntl.LOCK_SH), "nobody is beside it"
    leave.set()
    waiting.join(60)
    assert is_free(door, fcntl.LOCK_EX) and is_free(room, fcntl.LOCK_EX)


def test_what_waits_begins_beside_what_computes_and_files_stay_whole():
    names = ["unit/a", "hf/b", "fault/c", "serve/d", "hosts/e", "hf/f", "kernels/g"]
    asked = [SimpleNamespace(nodeid=f"tests/{name}.py::test_{i}") for i in range(2) for name in names]
    items = list(asked)
    pytest_collection_modifyitems(items)
    assert sorted(item.nodeid for item in items) == sorted(item.nodeid for item in asked)
    files = [file for file, _ in groupby(item.nodeid.partition("::")[0][6:-3] for item in items)]
    assert files == ["fault/c", "serve/d", "hf/b", "hosts/e", "hf/f", "kernels/g", "unit/a"]
