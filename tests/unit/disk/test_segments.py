"""Which of an earlier daemon's files are believed, without a daemon.

Method: Segments makes real shared memory for a configuration, the files are changed, a second Segments opens
the same directory: it either adopts a pool whole or makes a new one, and removes only what is its own.
"""

import dataclasses
import json
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

from kvstored.config.config import Config
from kvstored.errors import StartupError
from kvstored.process import runtime_dir
from kvstored.tiers import pool_files
from kvstored.tiers import pools as segments_module
from kvstored.tiers.pool_files import ROLES, SHM_DIR, Named, file_system, has_huge_pages
from kvstored.tiers.pools import Geometry, Segments
from tests.fault.disks.devices import huge_memory

GEOMETRY = Geometry("default", 8 << 20, 64, 16384, 4096)


class World:
    """One runtime directory and all segments ever made for it."""

    def __init__(self, path):
        self.config = Config(dir=str(path), memory=8 << 20)
        self.state = path / "state.json"
        self.retired = 0
        self._open = []

    def open(self, *geometries, fresh=False):
        segments = Segments(self.config, list(geometries) or [GEOMETRY], self._retire)
        self._open.append(segments)
        pools = segments.open(fresh)
        segments.settle()
        return segments, pools

    def _retire(self, fd):
        os.fstat(fd)
        self.retired += 1

    def prefix(self):
        return json.loads(self.state.read_text())["pools"]["default"]["prefix"]

    def files(self, prefix):
        return {path.name.removeprefix(prefix) for path in Path(SHM_DIR).glob(prefix + "*")}

    def close(self):
        for segments in self._open:
            segments.discard()
            segments.close()


@pytest.fixture
def world(tmp_path):
    built = World(tmp_path)
    yield built
    built.close()


def path_of(pool, role):
    return Path(Named(pool.place).path(pool.prefix, role))


def adopted(world, *geometries, **options):
    return [pool.adopted for pool in world.open(*geometries, **options)[1]]


def test_what_was_made_is_found_again(world):
    _, (made,) = world.open()
    _, (found,) = world.open()
    assert not made.adopted and found.adopted
    assert (found.pool_id, found.prefix) == (made.pool_id, made.prefix)
    for role, fd in zip(ROLES, found.fds, strict=True):
        status = os.fstat(fd)
        assert os.stat(path_of(found, role)).st_ino == status.st_ino and runtime_dir.is_own(status)
        assert not os.get_inheritable(fd)
    assert os.fstat(found.table_fd).st_blocks * 512 >= GEOMETRY.table_bytes, (
        "the table's memory is not reserved"
    )
    assert os.fstat(found.pool_fd).st_size == 0, "the pool grows later, by fallocate"


def test_two_pools_never_share_a_name_or_an_id(world):
    _, (first,) = world.open()
    _, (second,) = world.open(fresh=True)
    assert first.prefix != second.prefix and first.pool_id != second.pool_id
    assert world.files(first.prefix) == set() and world.retired == 1


def entry(**changes):
    def change(text):
        state = json.loads(text)
        state["pools"]["default"].update(changes)
        return json.dumps(state)

    return change


STATE_CHANGES = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "deep": lambda text: "[" * 100_000,
    "huge": lambda text: text + " " * (2 << 20),
    "null": lambda text: "null",
    "list": lambda text: "[]",
    "no pools": lambda text: '{"version": 1}',
    "pools are a list": lambda text: '{"version": 1, "pools": []}',
    "a pool is a number": lambda text: '{"version": 1, "pools": {"default": 3}}',
    "another version": lambda text: text.replace('"version": 1', '"version": 2'),
    "zeros": lambda text: "\0" * 4096,
    "no text": lambda text: "\udcff",
    "a path as prefix": entry(prefix="../../etc/passwd"),
    "another prefix": entry(prefix="kvstored-0000000000000000-0"),
    "no prefix": entry(prefix=None),
    "no pool id": entry(pool_id="zz"),
    "a relative pool_dir": entry(pool_dir="x"),
    "another pool_dir": entry(pool_dir="/nonexistent"),
    "NUL in pool_dir": entry(pool_dir="/a\0b"),
    "unfinished": entry(complete=False),
    "finished is no bool": entry(complete="yes"),
    "no geometry": entry(geometry={}),
    "geometry is a list": entry(geometry=[]),
}


@pytest.mark.parametrize("change", STATE_CHANGES.values(), ids=STATE_CHANGES.keys())
def test_a_state_file_that_does_not_fit_is_not_believed(world, change):
    _, (old,) = world.open()
    world.state.write_text(change(world.state.read_text()), errors="surrogateescape")
    assert adopted(world) == [False]
    assert adopted(world) == [True], "the new one is found again"
    Segments.discard(world._open[0])
    assert world.files(old.prefix) == set()


@pytest.mark.parametrize("how", ["mode", "link", "symlink", "fifo"])
def test_a_state_file_that_may_be_anothers_is_not_believed(world, how, tmp_path):
    world.open()
    path, other = world.state, tmp_path / "other"
    if how == "mode":
        path.chmod(0o644)
    elif how == "link":
        os.link(path, other)
    elif how == "symlink":
        path.rename(other)
        path.symlink_to(other)
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    assert adopted(world) == [False]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["missing", "mode", "link", "longer", "shorter", "symlink"])
def test_a_segment_that_does_not_fit_is_not_adopted(world, role, how, tmp_path):
    _, (pool,) = world.open()
    path = path_of(pool, role)
    os.ftruncate(pool.pool_fd, pool.geometry.capacity_bytes)
    if how == "missing":
        path.unlink()
    elif how == "mode":
        path.chmod(0o666)
    elif how == "link":
        os.link(path, path.with_name(path.name + "-copy"))
    elif how == "longer":
        os.truncate(path, path.stat().st_size + 4096)
    elif how == "shorter":
        os.truncate(path, path.stat().st_size - 4096)
    else:
        path.rename(path.with_name(path.name + "-moved"))
        path.symlink_to(path.name + "-moved")
    # A pool may be shorter than its capacity: it had not grown further. Whether blocks are cut is for the
    # store to find.
    assert adopted(world) == [how == "shorter" and role == "pool"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_segment_is_neither_adopted_nor_removed(world):
    _, (pool,) = world.open()
    path = path_of(pool, "pool")
    os.chown(path, 1234, -1)
    assert adopted(world) == [False]
    assert path.exists()
    path.unlink()


@pytest.mark.parametrize("field", ["capacity_bytes", "max_blocks", "table_bytes", "progress_bytes"])
def test_another_geometry_is_another_pool(world, field):
    world.open()
    old = world.prefix()
    assert adopted(world, dataclasses.replace(GEOMETRY, **{field: 2 * getattr(GEOMETRY, field)})) == [False]
    assert world.files(old) == set()


def test_a_namespace_that_is_gone_takes_its_pool_with_it(world):
    other = dataclasses.replace(GEOMETRY, namespace="other")
    _, (_, second) = world.open(GEOMETRY, other)
    assert adopted(world, GEOMETRY) == [True]
    assert world.files(second.prefix) == set()
    assert adopted(world, GEOMETRY, other) == [True, False]


def test_a_pool_that_the_store_refuses_is_replaced(world):
    segments, (old,) = world.open()
    new = segments.replace("default")
    assert not new.adopted and new.prefix != old.prefix and world.files(old.prefix) == set()
    assert adopted(world) == [True]


def test_what_cannot_fit_is_refused_before_anything_is_removed(world):
    _, (pool,) = world.open()
    before = world.files(pool.prefix)
    with pytest.raises(StartupError, match=r"has \d+ bytes free now .*, \d+ are needed: \d+ more"):
        world.open(dataclasses.replace(GEOMETRY, capacity_bytes=1 << 60))
    assert world.files(pool.prefix) == before and adopted(world) == [True]


def test_a_pool_that_could_not_be_made_leaves_nothing(world):
    """By the limit on a file's size (ulimit -f): the table of the second is too long."""
    _, (first,) = world.open()
    before, state = set(os.listdir(SHM_DIR)), world.state.read_text()
    large = dataclasses.replace(GEOMETRY, namespace="other", table_bytes=1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        for geometries in ([GEOMETRY, large], [large]):
            segments = Segments(world.config, geometries, world._retire)
            with pytest.raises(StartupError, match="File too large"), segments.undone_if_it_fails():
                segments.open(fresh=False)
            segments.close()
            mine = {name for name in set(os.listdir(SHM_DIR)) - before if name.startswith(first.prefix[:17])}
            assert mine == set() and world.state.read_text() == state
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert adopted(world) == [True]


def test_the_first_pool_that_could_not_be_made_leaves_nothing(world):
    large = dataclasses.replace(GEOMETRY, table_bytes=1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        segments = Segments(world.config, [large], world._retire)
        with pytest.raises(StartupError, match="File too large"), segments.undone_if_it_fails():
            segments.open(fresh=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mark = pool_files.mark_of(str(world.state.parent))
    assert not list(Path(SHM_DIR).glob(f"kvstored-{mark}*")) and not world.state.exists()


def test_a_directory_of_any_bytes_has_a_mark(tmp_path):
    """As Python reads one that is no UTF-8, or one that is where the locale knows ASCII alone."""
    assert pool_files.mark_of(str(tmp_path / "d\udce4")) == ""
    (tmp_path / "d\udce4").mkdir()
    assert re.fullmatch("[0-9a-f]{8}", pool_files.mark_of(str(tmp_path / "d\udce4")))


def test_what_the_machine_can_give_now_counts_and_not_what_it_has(world, monkeypatch):
    """A tmpfs, or a memfd, may be larger than the memory that is left."""
    monkeypatch.setattr(pool_files, "available_bytes", lambda: 4096)
    for pool in ("shm", "memfd"):
        place = pool_files.Named(SHM_DIR) if pool == "shm" else pool_files.Sealed(None)
        assert place.free_bytes("pool") == 4096
    monkeypatch.undo()
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < pool_files.available_bytes() < 2 * has
    monkeypatch.setattr(pool_files, "MEMINFO", "/absent")
    assert pool_files.available_bytes() == has


def test_a_tmpfs_without_a_size_gives_what_the_machine_has(world, tmp_path, monkeypatch):
    """size=0: statvfs says no blocks at all."""
    monkeypatch.setattr(pool_files, "MEMINFO", str(tmp_path / "meminfo"))
    (tmp_path / "meminfo").write_text("MemAvailable: 4 kB\nSwapFree: 4 kB\n")
    none = os.statvfs_result([0] * 11)
    monkeypatch.setattr(pool_files.os, "statvfs", lambda _: none)
    assert Named(SHM_DIR).free_bytes("pool") == 8192


def test_sealed_memory_that_is_given_up_counts_as_free(world, monkeypatch):
    """A start with another geometry, or --fresh, was refused for want of the memory that it would give
    back."""
    world.config = dataclasses.replace(world.config, pool="memfd")
    _, (old,) = world.open()
    os.posix_fallocate(old.pool_fd, 0, GEOMETRY.capacity_bytes)
    kept = dict(zip((f"{old.prefix}.{role}" for role in ROLES), old.fds, strict=True))
    monkeypatch.setattr(
        "kvstored.process.fd_store._given", lambda _: {name: [os.dup(fd)] for name, fd in kept.items()}
    )
    room = sum(os.fstat(fd).st_blocks * 512 for fd in old.fds)
    monkeypatch.setattr(pool_files, "available_bytes", lambda: GEOMETRY.capacity_bytes + 65536 - room)
    with pytest.raises(StartupError, match="are needed"):
        world.open(dataclasses.replace(GEOMETRY, capacity_bytes=2 * GEOMETRY.capacity_bytes))
    assert adopted(world, fresh=True) == [False] and world.retired == 1


def test_session_pages_go_with_their_pool(world):
    segments, (pool,) = world.open()
    page = Path(SHM_DIR) / f"{pool.prefix}.s.0123"
    page.touch(mode=0o600)
    segments.discard()
    assert world.files(pool.prefix) == set()


def test_a_pool_on_a_disk_is_refused(tmp_path):
    if file_system(str(tmp_path))[0] in ("tmpfs", "ramfs"):
        pytest.skip("no disk under the temporary directory")
    config = Config(dir=str(tmp_path), pool_dir=str(tmp_path))
    with pytest.raises(StartupError, match="tmpfs, hugetlbfs"):
        Segments(config, [GEOMETRY], os.close)
    with pytest.raises(StartupError, match="no directory"):
        Segments(Config(dir=str(tmp_path), pool_dir=str(tmp_path / "x")), [GEOMETRY], os.close)


def test_the_file_system_of_shared_memory_is_known():
    assert file_system(SHM_DIR)[0] == "tmpfs" and not has_huge_pages(SHM_DIR + "/absent")


@pytest.fixture
def huge(tmp_path, monkeypatch):
    """A tmpfs with huge pages where the daemon looks for one."""
    place = tmp_path / "huge"
    place.mkdir()
    with huge_memory(place, 64):
        monkeypatch.setattr(pool_files, "HUGE_DIR", str(place))
        monkeypatch.setattr(segments_module, "HUGE_DIR", str(place))
        yield place


def test_a_tmpfs_with_huge_pages_is_taken_when_nobody_names_another(world, huge):
    segments, (pool,) = world.open()
    assert pool.place == str(huge) and pool.huge_pages
    assert {path.name.removeprefix(pool.prefix) for path in huge.iterdir()} == {f".{role}" for role in ROLES}
    assert world.files(pool.prefix) == {".home"}, "nothing of it lies in /dev/shm but whose it is"
    assert adopted(world) == [True]
    segments.discard()
    assert not list(huge.iterdir())


def test_a_tmpfs_with_huge_pages_that_is_too_small_is_not_used(world, huge):
    subprocess.run(["mount", "-o", "remount,size=4k", huge], check=True)
    _, (pool,) = world.open()
    assert pool.place == SHM_DIR and not pool.huge_pages and not list(huge.iterdir())
    assert adopted(world) == [True]
    world.config = dataclasses.replace(world.config, pool_dir=str(huge))
    with pytest.raises(StartupError, match="bytes free"):
        world.open()


def test_a_pool_is_adopted_where_it_lies_though_a_new_one_would_lie_elsewhere(world, huge, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(pool_files, "HUGE_DIR", "/absent")
        _, (old,) = world.open()
    assert old.place == SHM_DIR and not old.huge_pages
    _, (found,) = world.open()
    assert found.adopted and found.place == SHM_DIR
    _, (new,) = world.open(fresh=True)
    assert new.place == str(huge) and world.files(old.prefix) == set()


def test_a_pool_that_lies_elsewhere_than_was_said_is_not_adopted(world, huge):
    _, (pool,) = world.open()
    world.config = dataclasses.replace(world.config, pool_dir=SHM_DIR)
    _, (new,) = world.open()
    assert not new.adopted and new.place == SHM_DIR and not list(huge.iterdir()), pool.prefix
