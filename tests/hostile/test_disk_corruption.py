"""Goal: whatever is wrong with a block's file, the daemon hands out a miss, forgets the file and serves its
neighbours. Method: a real daemon's own files, each damaged in another way of tests/hostile/block_damages.py,
while it runs or before another one indexes them; blocks whose bytes follow from their keys.
"""

import pytest

from tests.fault.children import eventually
from tests.fault.disks.rig import BLOCK
from tests.hostile.block_damages import SPECIAL, data_damages, header_damages

LAYER_BYTES = 32 << 10
HEADER_BYTES = 4096
TAIL = HEADER_BYTES + BLOCK.num_layers * LAYER_BYTES
SIZE = HEADER_BYTES + BLOCK.length(BLOCK.block_tokens)
STARTS = [HEADER_BYTES + layer * LAYER_BYTES for layer in range(BLOCK.num_layers)]
DAMAGES = {**header_damages(), **data_damages(STARTS, TAIL, SIZE), **SPECIAL}
GOOD = 4  # blocks that nobody touches


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "before it starts"])
def test_no_damage_is_served(rig, integrity, running):
    disk = rig()
    keys: list[bytes] = []
    while len(keys) < len(DAMAGES) + GOOD:
        keys += disk.put_on_disk(8)
    disk.evict()
    disk.settled()
    if not running:
        disk.daemon.stop()
    assert disk.file_of(keys[0]).stat().st_size == SIZE
    for key, damage in zip(keys, DAMAGES.values(), strict=False):
        damage(disk.file_of(key))
    if not running:
        disk.restart(memory_too=True)
    disk.settled()
    served = disk.load(keys)
    names = [*DAMAGES, *["good"] * (len(keys) - len(DAMAGES))]
    assert [name for name, hit in zip(names, served, strict=True) if hit] == names[len(DAMAGES) :]
    disk.settled()
    left = {path.name for path in disk.files()}
    stays = [name for name, key in zip(DAMAGES, keys, strict=False) if f"{key.hex()}.kv" in left]
    assert set(stays) <= set(SPECIAL)  # at start a link is a stray: reported, never touched
    integrity(disk.daemon)
    disk.serves()


NAMES = [  # "K" is the key of a block that was put
    "notes", "a.kv", "A" * 64 + ".kv", "0" * 63 + ".kv", "0" * 65 + ".kv", "K.kv~", "K", ".K.kv", "K.KV",
    "K.kv.kv", "x/K.kv", "a b\n\x1b[2J.kv", "\udcff\udcfe.kv", "x" * 255,
]  # fmt: skip


def test_names_that_are_no_keys_are_nobodys_blocks(rig, integrity):
    """Each holds the bytes of a good block: it is neither found nor counted, and stays where it is."""
    disk = rig(args=("--log-level", "debug"))
    keys = disk.put_on_disk(3)
    disk.daemon.stop()
    taken = disk.file_of(keys[0])
    bytes_of_it, strays = taken.read_bytes(), []
    for name in NAMES:
        path = taken.parent / name.replace("K", keys[0].hex())
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes_of_it)
        strays.append(path)
    taken.unlink()
    disk.restart(memory_too=True)
    assert disk.load(keys) == [False, True, True]
    disk.settled()
    now = disk.counters()
    assert now["disk_files"] == 2 and now["disk_bytes"] == 2 * len(bytes_of_it), now
    disk.delete(keys)
    disk.restart(memory_too=True)
    disk.settled()
    assert all(path.read_bytes() == bytes_of_it for path in strays)
    assert "\x1b" not in disk.daemon.log(), "nor does a name reach a terminal as it is"
    disk.delete(disk.put_on_disk(2))
    integrity(disk.daemon)


@pytest.mark.parametrize("fanout", ["0x1", "2x1", "3x1", "1x2"])
def test_a_block_where_another_fanout_has_it_is_removed(rig, integrity, fanout):
    """The tier counts what it can find by its path: left there it would lie beside the quota for ever."""
    disk = rig()
    keys = disk.put_on_disk(3)
    disk.daemon.stop()
    here, name = disk.file_of(keys[0]), keys[0].hex()
    levels, digits = map(int, fanout.split("x"))
    there = here.parents[1].joinpath(*(name[i * digits : (i + 1) * digits] for i in range(levels)), here.name)
    there.parent.mkdir(exist_ok=True, parents=True)
    here.rename(there)
    disk.restart(memory_too=True)
    eventually(lambda: not there.exists(), "it goes")
    assert disk.load(keys) == [False, True, True]
    assert disk.counters()["disk_files"] == 2
    integrity(disk.daemon)


def test_swapped_files_are_two_misses(rig, integrity):
    disk = rig()
    keys = disk.put_on_disk(3)
    disk.evict()
    disk.settled()
    first, second = disk.file_of(keys[0]), disk.file_of(keys[1])
    spare = disk.directory / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    assert disk.load(keys) == [False, False, True]
    eventually(lambda: disk.counters()["disk_corrupt"] == 2, "both are counted")
    disk.sound(integrity)
