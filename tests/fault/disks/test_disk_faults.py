"""Goal: whatever call to the file system fails, and whichever time it is called, no wrong byte is handed out,
nothing leaks, the quota holds and the daemon serves (docs/design.md §12). Method: a real daemon whose calls
fail on a schedule (native/core/files/faults.h), blocks whose bytes follow from their keys, then the list
of tests/fault/disks/rig.py.
"""

import random

import pytest

from tests.fault.children import eventually

# What the kernel can answer at each step of a write and of a load.
WRITING = {
    "create": ["eio", "enospc", "erofs", "enomem", "emfile"],
    "write": ["eio", "enospc", "enomem", "short", "full"],
    "publish": ["eio", "enospc", "erofs", "enomem"],
}
LOADING = {
    "open": ["eio", "enomem", "emfile"],
    "read": ["eio", "short", "enomem", "full", "flip"],
    "remove": ["eio", "erofs", "enomem"],
}


def each_once(step: str, faults: list[str]) -> str:
    """Every other call fails, each time in another way."""
    return ",".join(f"{step}_{fault}=@{2 * n + 1}" for n, fault in enumerate(faults))


@pytest.mark.parametrize("step", WRITING)
def test_a_write_that_fails_costs_that_block_only(rig, integrity, step):
    disk = rig(each_once(step, WRITING[step]))
    keys = disk.put_on_disk(12)
    failed = disk.counters()["disk_write_errors"]
    assert len(WRITING[step]) - 1 <= failed <= len(WRITING[step])  # a full queue may only be waited for
    disk.counted_right()
    assert all(disk.load(keys, wait_s=0)), "memory has them whatever the disk says"
    disk.settled()
    disk.evict()
    assert disk.sound(integrity) >= 12 - failed
    assert disk.counters()["disk_corrupt"] == 0, "what was not written whole has a block's name"
    eventually(lambda: not disk.states(), "the trouble is over, and no state says otherwise")


@pytest.mark.parametrize("step", LOADING)
def test_a_load_that_fails_is_a_miss_or_comes_later(rig, integrity, step):
    disk = rig()
    keys = disk.put_on_disk(12)
    disk.evict()
    disk.restart(each_once(step, LOADING[step]))
    first = sum(disk.load(keys))
    assert first >= 12 - len(LOADING[step])
    assert disk.sound(integrity) >= first
    eventually(lambda: not disk.states(), "the trouble is over, and no state says otherwise")


def test_a_temporary_file_that_cannot_be_removed_is_counted_and_goes_later(rig, integrity):
    disk = rig("write_eio=@1,write_short=@2,remove_eio=@1,remove_erofs=@2,remove_enomem=@3", quota="4MiB")
    disk.put_on_disk(12)
    eventually(lambda: not disk.temporary(), "the temporary files are gone")
    disk.sound(integrity)


def test_a_corrupt_file_that_cannot_be_kept_goes_all_the_same(rig, integrity):
    disk = rig(args=("--keep-corrupt", "--log-level", "warning"))
    keys = disk.put_on_disk(4)
    disk.evict()
    for key in keys[:3]:
        with disk.file_of(key).open("r+b") as file:
            file.seek(5000)
            file.write(b"not what was written")
    disk.restart("aside_eio=@1,aside_enospc=@2")
    assert disk.load(keys) == [False, False, False, True]
    eventually(lambda: len(disk.files()) == 1, "the names of the wrong ones are free")
    assert len(list(disk.directory.rglob("aside/*"))) == 1
    disk.sound(integrity)


TROUBLES = {"create_enospc": "disk_full", "publish_erofs": "disk_read_only", "write_eio": "disk_failed"}
MORE_TROUBLES = {
    "create_erofs": "disk_read_only",
    "create_emfile": "disk_failed",
    "create_enomem": "disk_failed",
    "write_enospc": "disk_full",
    "publish_eio": "disk_failed",
}


@pytest.mark.parametrize(
    ("fault", "state"),
    [*TROUBLES.items(), *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE_TROUBLES.items())],
)
def test_a_disk_that_cannot_be_written_has_a_name_while_it_lasts(rig, integrity, fault, state):
    """The store goes on without it; what it holds is still found; after a while it is used again."""
    disk = rig()
    before = disk.put_on_disk(4)
    disk.restart(f"{fault}=@1+")
    keys = disk.put(8)
    disk.client.touch(keys)
    eventually(lambda: disk.states() == {state}, "the state has its name")
    disk.evict()
    assert all(disk.load(before)), "reading goes on"
    disk.serves()
    disk.client.touch(disk.put(4))  # what was read has ended the state, perhaps
    eventually(lambda: disk.states() == {state}, "it goes on")
    disk.restart()
    assert disk.states() == set()
    disk.put_on_disk(4)
    assert disk.sound(integrity) >= 8


@pytest.mark.parametrize("fault", ["open_eio", "read_eio", "read_short", "read_flip"])
def test_a_disk_that_cannot_be_read_costs_its_blocks_only(rig, integrity, fault):
    disk = rig()
    keys = disk.put_on_disk(6)
    disk.evict()
    disk.restart(f"{fault}=@1+")
    assert not any(disk.load(keys, wait_s=2.0))
    disk.serves()
    if fault.endswith("eio"):
        eventually(lambda: disk.states() == {"disk_failed"}, "the state has its name")
        disk.restart()
        assert all(disk.load(keys)), "the files were kept: nothing says that they are wrong"
    else:
        eventually(lambda: disk.counters()["disk_corrupt"] == 6, "all are counted")
        eventually(lambda: disk.counters()["disk_files"] == 0, "all are gone")
    disk.sound(integrity)


def test_the_trouble_ends_while_nobody_asks(rig):
    """The state goes when the disk is better, not only at the next write."""
    disk = rig("create_enospc=@1,create_enospc=@2")
    key = disk.put(1)
    disk.client.touch(key)
    eventually(lambda: disk.states() == {"disk_full"}, "the state has its name")
    disk.delete(key)
    eventually(lambda: disk.states() == set(), "and goes by itself")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
def test_everything_fails_now_and_then(rig, integrity, seed):
    """All failures at every step with a chance each, over several lives of the daemon."""
    choose = random.Random(seed)
    parts = [f"{step}_{fault}" for table in (WRITING, LOADING) for step in table for fault in table[step]]
    disk = rig(quota="8MiB")
    for _ in range(12):
        chances = ",".join(f"{part}={choose.choice([0, 0.01, 0.1])}" for part in parts)
        if memory_too := choose.random() < 0.3:
            disk.deleted.clear()  # nobody knows any more which removals had failed
        disk.restart(f"seed={choose.randrange(1 << 30)},{chances}", memory_too=memory_too)
        for _ in range(6):
            disk.client.touch(disk.put(12))
            disk.load(choose.sample(disk.keys, min(24, len(disk.keys))), wait_s=0.5)
            disk.delete(choose.sample(disk.keys, 4))
            assert disk.counters()["disk_bytes"] <= 8 << 20
        disk.evict()
    disk.restart(memory_too=True)
    disk.deleted.clear()
    disk.sound(integrity)
