"""Goal: whatever stands in a block's file, the daemon hands out the block's bytes or nothing, the same each
time, and forgets the file (peers' cases 3 to 6 and 10). Method: a real daemon writes the files; each is
damaged in another way (tests/hostile/block_damages.py) behind its back, then asked for again and again, by
the daemon that wrote it and by the next one.
"""

import dataclasses
import os
import re
from pathlib import Path

import pytest

from kvclient.blocks.identity import reuse_identity
from kvclient.blocks.keys import chain
from kvclient.testing.conformance.case import SMALL, fill
from tests.fault.children import eventually
from tests.fault.disks.rig import BLOCK, PAGE, DiskRig, tolerated
from tests.hostile.block_damages import SPECIAL, data_damages, header_damages
from tests.unit.formats.test_identity import BASE, CHANGES

TWO_LEVELS = ("--disk-fanout", "2x1")  # a daemon's own; other tests have fewer directories
LAYER_BYTES = sum(BLOCK.layer_bytes_per_token) * BLOCK.block_tokens // BLOCK.num_layers
STARTS = [PAGE + LAYER_BYTES * layer for layer in range(BLOCK.num_layers)]
TAIL = PAGE + LAYER_BYTES * BLOCK.num_layers


@pytest.mark.parametrize("restarted", [False, True], ids=["same daemon", "next daemon"])
def test_every_damage_is_the_same_miss_every_time(rig, integrity, restarted):
    """Peers' cases 3, 4 and 5: a page overwritten, a file cut, lengths that are absurd, what is no file. The
    whole matrix, asked for once, is tests/hostile/test_disk_corruption.py."""
    kv = rig(quota="128MiB", args=("--log-level", "warning", *TWO_LEVELS))
    damaged: dict[str, bytes] = {}
    good = kv.put_on_disk(6)
    size = kv.file_of(good[0]).stat().st_size
    every = {**header_damages(), **data_damages(STARTS, TAIL, size)}
    damages = {name: do for name, do in every.items() if re.search("zeroed|^cut|huge|longer", name)} | SPECIAL
    assert len(damages) > 30
    names = list(damages)
    for at in range(0, len(names), 12):
        part = names[at : at + 12]
        damaged |= zip(part, kv.put_on_disk(len(part)), strict=True)
    kv.evict()
    paths = {name: kv.file_of(key) for name, key in damaged.items()}
    for name, damage in damages.items():
        damage(paths[name])
    if restarted:
        kv.restart(memory_too=True)
        kv.settled()
    for _ in range(3):
        found = dict(zip(names, kv.load([damaged[name] for name in names], wait_s=2.0), strict=True))
        assert not any(found.values()), [name for name, hit in found.items() if hit]
    assert all(kv.load(good)), "the others are as they were"
    wrong = len(names) - len(SPECIAL) - restarted  # the one of a terabyte is not even listed then
    eventually(lambda: sum(map(kv.counters().get, ("disk_corrupt", "disk_load_misses"))) >= wrong, "counted")
    left = [name for name, path in paths.items() if path.is_file() and not path.is_symlink()]
    eventually(lambda: not [name for name in left if paths[name].is_file()], f"removed: {left}")
    states = zip(names, kv.client.lookup([damaged[name] for name in names]).states, strict=True)
    assert not [name for name, state in states if state], "every tier has forgotten them"
    remake(kv, list(damaged.values()), paths)
    for path in [*paths.values(), *kv.directory.rglob("elsewhere")]:
        put_away(path)
    kv.sound(integrity)


def test_absurd_lengths_cost_no_memory(rig, integrity):
    """Peers' case 5: lengths in a header, under a checksum that fits, take no memory for what they say."""
    kv = rig(args=TWO_LEVELS)
    absurd = re.compile("huge|another page|longer")
    damages = {name: do for name, do in header_damages().items() if absurd.search(name)}
    assert len(damages) >= 7
    keys = kv.put_on_disk(len(damages) + 1)
    assert all(kv.load(keys))
    kv.evict()
    assert kv.load(keys[-1:]) == [True], "whatever one load takes is taken"
    before = address_space_peak(kv.daemon.pid)
    for key, damage in zip(keys, damages.values(), strict=False):
        damage(kv.file_of(key))
    assert kv.load(keys) == [False] * len(damages) + [True]
    assert address_space_peak(kv.daemon.pid) - before < MOST_GROWTH
    kv.sound(integrity)


# Of address space, which threads reserve. A length that was believed is 1 GiB at least.
MOST_GROWTH = 512 << 20


def address_space_peak(pid: int) -> int:
    """The most that ever was mapped: also what was given back at once, or never touched."""
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmPeak" in row]
    return int(line.split()[1]) << 10


def remake(kv: DiskRig, keys: list[bytes], paths: dict[str, Path]) -> None:
    """The keys can be put again, in memory at least."""
    for at in range(0, len(keys), 12):
        part = keys[at : at + 12]
        with kv.client.create(part, kv.layout) as writer:
            assert writer.results == ["granted"] * len(part)
            for index in writer.granted:
                fill(writer[index], BLOCK.num_layers)
        assert all(kv.load(part, wait_s=0))
    kv.settled()
    kv.delete(keys)


def put_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        (path / "inside").unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def test_a_key_is_never_poisoned_by_a_crash_before_its_name(rig, integrity):
    """Peers' case 6: a file exists complete or not at all, and its key can be put and written again."""
    for step, call in (("create", 1), ("write", 1), ("done", 1), ("publish", 1)):
        kv = rig(f"{step}_kill=@{call}", args=("--log-level", "warning"), directory=None)
        key = kv.put(1)
        with tolerated():
            kv.client.touch(key)
        kv.was_killed()
        assert not kv.files(), "it has no name before it is whole"
        kv.restart(memory_too=True)
        kv.settled()
        eventually(lambda kv=kv: not kv.temporary(), "what was begun is swept")
        assert kv.load(key, wait_s=1.0) == [False]
        kv.put(1, keys=key)
        kv.client.touch(key)
        kv.settled()
        assert len(kv.files()) == 1
        kv.evict()
        assert kv.load(key) == [True]
        assert kv.sound(integrity) == 1


def test_a_difference_in_any_dimension_misses_from_disk_too(rig, integrity):
    """Peers' case 10: the same tokens under an identity that differs in one dimension."""
    kv = rig()
    tokens = list(range(BLOCK.block_tokens * 4))
    ours = chain(reuse_identity(BASE), tokens, BLOCK.block_tokens).keys
    ours = (
        [bytes(ours[at : at + 32]) for at in range(0, len(ours), 32)]
        if isinstance(ours, bytes)
        else list(ours)
    )
    kv.put(4, keys=ours)
    kv.client.touch(ours)
    kv.settled()
    kv.evict()
    assert set(kv.client.lookup(ours).states) == {3}
    for name, value in CHANGES.items():
        identity = reuse_identity(dataclasses.replace(BASE, **{name: value}))
        theirs = chain(identity, tokens, BLOCK.block_tokens)
        assert not set(kv.client.lookup(theirs).states) & {2, 3}, name
        assert kv.client.get(theirs, wait_s=1.0).hits == 0, name
    assert all(kv.load(ours))
    kv.sound(integrity)


def test_a_file_of_another_layout_misses(rig, integrity):
    """A daemon that knows another model only cannot read it, and leaves it to who can."""
    kv = rig()
    keys = kv.put_on_disk(2)
    kv.drop_client()
    kv.daemon.kill()
    kv.restart(memory_too=True)
    client = kv.daemon.connect()
    client.register_layout(SMALL.to_blob())
    with client.get(keys, wait_s=1.0) as blocks:
        assert blocks.hits == 0
    client.close()
    eventually(lambda: all(kv.load(keys)), "and whoever knows its model finds it")
    kv.sound(integrity)


def test_a_directory_in_place_of_a_file_is_no_failure_of_the_disk(rig, integrity):
    kv = rig()
    keys = kv.put_on_disk(4)
    kv.evict()
    path = kv.file_of(keys[0])
    SPECIAL["directory"](path)
    assert kv.load(keys) == [False, True, True, True]
    for _ in range(5):
        kv.put(1, keys=keys[:1])  # its file cannot have this name
        kv.client.touch(keys[:1])
        kv.settled()
        kv.client.delete(keys[:1])
    assert kv.counters()["disk_write_errors"] >= 5
    kv.put_on_disk(4)
    assert "degraded" not in kv.daemon.log()
    put_away(path)
    assert kv.sound(integrity) >= 7


def test_a_file_that_claims_to_be_larger_than_the_quota_costs_nobody_a_block(rig, integrity):
    kv = rig(quota="8MiB")
    keys = kv.put_on_disk(8)
    os.truncate(kv.file_of(keys[0]), 1 << 40)
    kv.restart(kill=True, memory_too=True)
    kv.settled()
    assert kv.load(keys) == [False] + [True] * 7
    assert kv.sound(integrity) == 7
