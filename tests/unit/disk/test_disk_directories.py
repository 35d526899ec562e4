"""Goal: what the daemon says of its disk directories is what lies in them. Method: files made beside it."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from kvstored.config.config import Config
from kvstored.config.namespaces import Namespace
from kvstored.errors import StartupError, StoreError
from kvstored.tiers import disk
from kvstored.tiers.disk_directories import Directories, left_over


def test_what_is_kept_aside_is_counted(tmp_path):
    configured = [str(tmp_path / name) for name in ("one", "two", "three")]
    directories = Directories(configured, "default")
    try:
        for at in range(len(configured)):
            directories.open(at)
        assert asyncio.run(directories.aside()) == (0, 0)
        for name, sizes in (("one", (10, 0)), ("two", (7,))):
            aside = tmp_path / name / "default/aside"
            aside.mkdir()
            for i, size_bytes in enumerate(sizes):
                (aside / f"{i}").write_bytes(b"x" * size_bytes)
        (tmp_path / "three/default/aside").write_bytes(b"no directory")
        (tmp_path / "two/default/aside/link").symlink_to("nowhere")
        count, size_bytes = asyncio.run(directories.aside())
        assert (count, size_bytes) == (4, 17 + len("nowhere"))
        (tmp_path / "three/default/aside").unlink()
        (tmp_path / "three/default/aside").symlink_to("aside")  # any error, as of a disk that fails
        assert asyncio.run(directories.aside()) == (count, size_bytes)
    finally:
        directories.close()


def test_what_a_namespace_left_that_is_no_more_is_named(tmp_path):
    configured = [str(tmp_path / name) for name in ("one", "two")]
    for path in configured:
        (tmp_path / path / "kept").mkdir(parents=True)
    for left in ("one/gone/tmp", "two/gone/tmp", "two/lost+found"):
        (tmp_path / left).mkdir(parents=True)
    (tmp_path / "one/file").write_bytes(b"")
    assert left_over(configured, {"kept"}) == [str(tmp_path / "one/gone"), str(tmp_path / "two/gone")]


def test_what_is_not_mounted_is_not_made(tmp_path):
    """A typo, or a disk that is away, would fill the file system above."""
    directories = Directories([str(tmp_path / "mnt" / "blocks")], "default")
    with pytest.raises(StartupError, match=f"{tmp_path}/mnt is no directory"):
        directories.open(0)
    assert not list(tmp_path.iterdir())


def test_a_lock_held_for_a_moment_refuses_nobody(tmp_path):
    """As `kvstored fsck` does, to see whether a daemon is there."""
    configured = Directories([str(tmp_path / "blocks")], "default")
    other = Directories([str(tmp_path / "blocks")], "default")
    other.open(0)
    with pytest.raises(StartupError, match="at work there"):
        configured.open(0)
    ends = threading.Timer(0.1, other.close)
    ends.start()
    configured.open(0)
    ends.join()
    configured.close()


def test_a_bound_on_what_is_written_a_day_is_never_none(tmp_path, monkeypatch):
    """0 is no limit, also where each namespace has a part of a byte."""
    bounds = []

    def refused(*_, daily_write_bytes, **__):
        bounds.append(daily_write_bytes)
        raise StoreError("enough")

    monkeypatch.setattr(disk._core, "DiskTier", refused)
    for said in (0, 1, 5 << 20):
        config = Config(
            dir=str(tmp_path), memory=16 << 20, disk=(str(tmp_path / "disk"),), disk_quota=16 << 20,
            disk_daily_writes=said, namespaces=(Namespace("a", 0.5), Namespace("b", 0.5)),
        )  # fmt: skip
        with pytest.raises(StartupError, match="enough"):
            disk.Tiers(config, {"a": None, "b": None}, ())
    assert bounds == [0, 1, 5 << 19]


@pytest.mark.parametrize("step", ["open", "begin"])
def test_a_disk_for_which_there_is_no_thread_is_told_as_failed(tmp_path, step):
    """It was said not to answer, or, where all had answered, nothing; and nothing was found there."""

    def refused(*_):
        raise RuntimeError("can't start new thread")

    class Native:
        begin = open = lambda *_: SimpleNamespace(name="threads", reason="")
        conditions = stop = lambda self: []

    setattr(Native, step, refused)
    directories = Directories([str(tmp_path / "blocks")], "default")
    tier = disk.Tier(Native(), directories, "default", "in_place", lambda: None)
    try:
        assert tier.answered.wait(60)
        tier.start()
        ((state, text),) = tier.conditions()
        assert state == "disk_failed" and "can't start new thread" in text
    finally:
        tier.close()
