"""Goal: a disk that never answers holds up neither the daemon's start nor its end, and is named. Method:
every open in its directory waits, by fanotify, until the test lets it go; the real daemon without any seam.
"""

import time

import pytest

from tests.fault.children import eventually
from tests.fault.disks.devices import unanswered

pytestmark = pytest.mark.root
STOP_S = 10.0  # docs/operations.md: drain_timeout_s and 5 s; and a machine that is busy


@pytest.fixture
def hung(rig):
    """A daemon that stopped, with blocks on the disk and none in memory; and their keys."""
    kv = rig()
    keys = kv.put_on_disk(6)
    kv.evict()
    kv.daemon.stop()
    return kv, keys


def test_a_daemon_starts_beside_a_disk_that_hangs(hung, integrity):
    kv, before = hung
    with unanswered(kv.directory / "default"):
        kv.restart()
        eventually(lambda: kv.states() == {"disk_failed"}, "it is named")
        assert f"{kv.directory}/default does not answer" in kv.daemon.log()
        kv.serves()
        assert kv.load(before[:1], wait_s=0) == [False], "a miss, at once"
        assert kv.delete(before[:2]) == 2
        kv.put(2)
    eventually(lambda: kv.states() == set(), "it answers, and the state goes")
    assert all(kv.load(before[2:]))
    assert kv.load(before[:2], wait_s=0.2) == [False] * 2, "deleted meanwhile"
    kv.sound(integrity)


def test_a_flush_while_the_disk_hangs_is_kept_when_it_answers(hung):
    kv, before = hung
    with unanswered(kv.directory / "default"):
        kv.restart()
        with pytest.raises(Exception, match="until a restart only"):
            kv.flush()
    eventually(lambda: kv.states() == set(), "it answers")
    assert not any(kv.load(before, wait_s=0.2))


@pytest.mark.parametrize("when", ["start", "service"])
def test_a_daemon_ends_beside_a_disk_that_hangs(hung, when):
    kv, before = hung
    if when == "service":
        kv.restart()
    with unanswered(kv.directory / "default"):
        if when == "start":
            kv.restart()
        else:
            kv.client.touch(kv.put(4))  # which opens files there
        kv.counters()  # which lists what is kept aside there
        begun = time.monotonic()
        assert kv.daemon.stop(timeout_s=STOP_S) == 0
        assert time.monotonic() - begun < STOP_S
    kv.restart()
    assert all(kv.load(before))


def test_a_directory_that_hangs_at_the_start_holds_up_no_other(rig, tmp_path, integrity):
    hanging, other = tmp_path / "one", tmp_path / "other"
    kv = rig(directory=hanging, args=("--disk", f"{hanging},{other}"))
    keys = kv.put_on_disk(24)
    kv.evict()
    kv.daemon.stop()

    def lies_in_other(key: bytes) -> bool:
        return any((other / "default").rglob(f"{key.hex()}.kv"))

    there = [key for key in keys if lies_in_other(key)]
    here = [key for key in keys if key not in there]
    assert min(len(there), len(here)) >= 3
    with unanswered(hanging / "default"):
        kv.restart()
        eventually(lambda: kv.states() == {"disk_failed"}, "it is named")
        assert f"{hanging}/default does not answer" in kv.daemon.log()
        assert f"{other}/default does not answer" not in kv.daemon.log()
        assert all(kv.load(there)), "what lies in the other comes"
        assert kv.load(here[:1], wait_s=0) == [False]
        assert all(lies_in_other(key) for key in kv.put_on_disk(6)), "what is written goes there"
        assert kv.delete([here[0], there[0]]) == 2
        eventually(lambda: not lies_in_other(there[0]), "its file goes")
    eventually(lambda: kv.states() == set(), "it answers, and the state goes")
    eventually(lambda: all(kv.load(here[1:])), "and its blocks are found")
    assert kv.load([here[0]], wait_s=0.2) == [False], "deleted meanwhile"
    integrity(kv.daemon)
