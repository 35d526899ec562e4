"""Goal: a daemon that is killed at any step of writing, naming, loading or removing a file, or whose machine
loses power, leaves nothing that its successor could hand out wrongly, lose track of or count wrongly
(docs/design.md §12; case 6 of docs/proof.md). Method: SIGKILL from inside, at a step of the schedule; then
another daemon on the same directory, with the pool it left and without.
"""

import contextlib
import random

import pytest

from tests.conftest import DaemonFailed
from tests.fault.children import eventually
from tests.fault.disks.rig import DiskRig, tolerated

WRITE_STEPS = ["create", "write", "done", "publish"]
LOAD_STEPS = ["open", "read", "done"]


def write_and_die(rig, step: str, call: int) -> DiskRig:
    disk = rig(f"{step}_kill=@{call}")
    keys = disk.put(8)
    with tolerated():
        disk.client.touch(keys)
    disk.was_killed()
    return disk


@pytest.mark.parametrize("memory_too", [False, True], ids=["adopted", "anew"])
@pytest.mark.parametrize("step", WRITE_STEPS)
def test_killed_while_writing(rig, integrity, step, memory_too):
    disk = write_and_die(rig, step, call=6)
    there = {path.stem for path in disk.files()}
    assert not memory_too or len(there) <= 8
    disk.restart(memory_too=memory_too)
    hits = disk.sound(integrity)
    assert hits == 8 if not memory_too else hits == len(there), "what had its name is found, nothing else"


@pytest.mark.parametrize("memory_too", [False, True], ids=["adopted", "anew"])
@pytest.mark.parametrize("step", LOAD_STEPS)
def test_killed_while_loading(rig, integrity, step, memory_too):
    disk = rig()
    keys = disk.put_on_disk(8)
    disk.evict()
    disk.restart(f"{step}_kill=@5")
    with tolerated():
        disk.load(keys)
    disk.was_killed()
    disk.restart(memory_too=memory_too)
    assert disk.sound(integrity) == 8


@pytest.mark.parametrize("memory_too", [False, True], ids=["adopted", "anew"])
def test_killed_while_keeping_a_wrong_file_aside(rig, integrity, memory_too):
    """The file is where it was, and as wrong: the next daemon finds that out too, and keeps it."""
    disk = rig(args=("--keep-corrupt",))
    keys = disk.put_on_disk(4)
    disk.evict()
    with disk.file_of(keys[0]).open("r+b") as file:
        file.seek(5000)
        file.write(b"not what was written")
    disk.restart("aside_kill=@1")
    with tolerated():
        disk.load(keys[:1])
    disk.was_killed()
    disk.restart(memory_too=memory_too)
    assert disk.load(keys) == [False, True, True, True]
    eventually(lambda: len(list(disk.directory.rglob("aside/*"))) == 1, "it is kept")
    assert disk.sound(integrity) == 3


@pytest.mark.parametrize("memory_too", [False, True], ids=["adopted", "anew"])
@pytest.mark.parametrize("resident", [False, True], ids=["on disk", "in memory"])
def test_killed_while_removing(rig, integrity, resident, memory_too):
    disk = rig("remove_kill=@3")
    keys = disk.put_on_disk(8)
    if not resident:
        disk.evict()
    answered = 0
    with tolerated():
        answered = disk.client.delete(keys)
    disk.was_killed()
    if answered == len(keys) and not memory_too:  # the table says which files are still to be removed
        disk.deleted |= set(keys)
    disk.restart(memory_too=memory_too)
    disk.settled()
    disk.sound(integrity)


@pytest.mark.parametrize("end", ["killed", "stopped", "killed by itself"])
def test_what_was_deleted_stays_so_over_every_end(rig, integrity, end):
    """Also if its file cannot be removed for a while, or the daemon ends before it has come to that."""
    disk = rig(quota="128MiB")
    keys = disk.put_on_disk(6)
    disk.evict()
    keys += disk.put_on_disk(6)
    disk.restart("remove_kill=@1" if end == "killed by itself" else "remove_eio=@1+")
    if end == "killed by itself":
        answered = 0
        with tolerated():
            answered = disk.client.delete(keys)
        disk.was_killed()
        if answered < len(keys):  # it ended before it could answer, and promised nothing
            disk.restart()
            disk.client.delete(keys)
        disk.deleted |= set(keys)
    else:
        assert disk.delete(keys) == 12
        assert not any(disk.load(keys, wait_s=0.1))
        assert len(disk.files()) == 12
    disk.restart(kill=end == "killed")
    assert not any(disk.load(keys, wait_s=0.5))
    eventually(lambda: not disk.files(), "their files go in the end")
    disk.sound(integrity)


def test_a_clean_end_removes_what_was_deleted(rig):
    disk = rig(quota="128MiB")
    keys = [key for _ in range(10) for key in disk.put_on_disk(16)]
    disk.delete(keys)
    disk.restart(memory_too=True)
    assert not any(disk.load(keys, wait_s=0.5))


@pytest.mark.parametrize("steps", [3, 9, 17, 30, 47])
def test_power_loss(rig, integrity, steps):
    """What was not flushed is dropped, emptied, cut or torn; the machine's memory is gone."""
    disk = rig(f"seed={steps},power_loss_after={steps}")
    keys = disk.put(16)
    with tolerated():
        disk.client.touch(keys)
        disk.settled()
        disk.evict()
        disk.load(keys)
    if disk.daemon.process.poll() is None:
        disk.daemon.kill()
    disk.restart(memory_too=True)
    disk.sound(integrity)


FULL = "2376KiB"  # nine files: the next block is written over one of them


@pytest.mark.parametrize("memory_too", [False, True], ids=["adopted", "anew"])
@pytest.mark.parametrize("step", ["reuse", "write", "done", "publish"])
def test_killed_while_writing_over_a_file_that_goes(rig, integrity, step, memory_too):
    disk = rig(quota=FULL)
    disk.put_on_disk(9)
    disk.restart(f"{step}_kill=@3")
    keys = disk.put(6)
    with tolerated():
        disk.client.touch(keys)
    disk.was_killed()
    disk.restart(memory_too=memory_too)
    assert disk.sound(integrity) >= 5


def test_a_file_that_cannot_be_written_over_is_removed(rig, integrity):
    disk = rig("reuse_eio=1", quota=FULL)
    disk.put_on_disk(9)
    disk.put_on_disk(4)
    counters = disk.counters()
    assert (counters["disk_reused"], counters["disk_removed"], counters["disk_files"]) == (0, 4, 9)
    disk.sound(integrity)


@pytest.mark.parametrize("steps", [2, 7, 12, 20, 33])
def test_power_loss_while_files_are_written_over(rig, integrity, steps):
    """The old name may come back, and stand for any mixture of the two blocks."""
    disk = rig(quota=FULL)
    disk.put_on_disk(9)
    disk.restart(f"seed={steps},power_loss_after={steps}")
    keys = disk.put(9)
    with tolerated():
        disk.client.touch(keys)
        disk.settled()
    disk.was_killed()
    disk.restart(memory_too=True)
    disk.sound(integrity)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_power_losses_in_a_row(rig, integrity, seed):
    """The directory keeps what the losses before made of it."""
    choose = random.Random(seed)
    disk = rig()
    for _ in range(40):
        faults = f"seed={choose.randrange(1 << 30)},power_loss_after={choose.randrange(1, 90)}"
        with tolerated(), contextlib.suppress(DaemonFailed):  # it may be lost during the start
            disk.restart(faults, memory_too=True)
            keys = disk.put(16)
            disk.client.touch(keys)
            disk.load(choose.sample(disk.keys, min(20, len(disk.keys))))
            disk.evict()
            disk.load(choose.sample(disk.keys, min(20, len(disk.keys))))
        if disk.daemon.process.poll() is None:
            disk.daemon.kill()
    disk.restart(memory_too=True)
    disk.sound(integrity)


@pytest.mark.parametrize("resident", [False, True], ids=["on disk", "in memory"])
def test_the_time_of_a_deleted_block_ends_while_its_file_stays(rig, integrity, resident):
    """Found by the soak: the daemon took the end of its time for a second deletion, and stopped."""
    disk = rig()
    keys = disk.put(4, ttl_s=8)
    disk.client.touch(keys)
    disk.settled()
    if not resident:
        disk.evict()
    disk.restart("remove_eio=@1+")
    assert disk.delete(keys) == 4
    witness = disk.put(1, ttl_s=8)
    eventually(lambda: disk.load(witness, wait_s=0) == [False], "a block of a longer time is over")
    integrity(disk.daemon)
    disk.restart()
    eventually(lambda: not disk.files(), "their files go")
    disk.sound(integrity)
