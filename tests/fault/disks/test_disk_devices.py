"""Goal: what a disk, a kernel or an operator really does to the disk tier - no room, read-only, slow, too few
descriptors, too little memory, no queues - degrades it by name and costs no byte (docs/design.md §12; case 9
of docs/proof.md). Method: an ext4 file system in a file, cgroups, resource limits, the kernel's own switches;
the real daemon without any seam.
"""

import contextlib
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import DaemonFailed
from tests.fault.children import eventually
from tests.fault.disks.devices import cgroup, numbers_of, small_disk
from tests.fault.disks.rig import DiskRig, tolerated

AIO_MAX = Path("/proc/sys/fs/aio-max-nr")
AIO_NOW = Path("/proc/sys/fs/aio-nr")


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path, 24) as made:
        yield made


def test_what_a_machine_lacks_is_the_reason_of_a_skip(tmp_path, monkeypatch):
    """No root, no program, no cgroup: skipped by name, nothing left mounted or made."""
    monkeypatch.setattr("tests.fault.disks.devices.CGROUPS", tmp_path)
    with pytest.raises(pytest.skip.Exception, match="no cgroup v1 controller blkio"), cgroup("blkio"):
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(pytest.skip.Exception, match=r"no mkfs\.ext4 on"), small_disk(tmp_path, 1):
        pass
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="mounting needs root"), small_disk(tmp_path, 1):
        pass


@pytest.mark.root
def test_the_disk_is_full(rig, disk, integrity):
    kv = rig(directory=disk.path / "kv")
    before = kv.put_on_disk(6)
    ballast = disk.fill(leave_bytes=600_000)
    kv.client.touch(kv.put(12))
    eventually(lambda: kv.states() == {"disk_full"}, "the state has its name")
    kv.counted_right()
    kv.evict()
    assert all(kv.load(before)), "what it holds is still found"
    kv.serves()
    ballast.unlink()
    eventually(lambda: kv.states() == set(), "room again, and the state goes")
    kv.client.touch(kv.put(6))
    kv.evict()
    assert kv.sound(integrity) >= 6


@pytest.mark.root
def test_the_disk_becomes_read_only(rig, disk, integrity):
    kv = rig(directory=disk.path / "kv")
    before = kv.put_on_disk(6)
    disk.remount("ro")
    kv.client.touch(kv.put(6))
    eventually(lambda: kv.states() == {"disk_read_only"}, "the state has its name")
    kv.evict()
    assert all(kv.load(before)), "what it holds is still found"
    assert kv.delete(before[:2]) == 2
    assert kv.load(before[:2], wait_s=0.1) == [False, False], "deleted, whatever becomes of its file"
    kv.serves()
    disk.remount("rw")
    eventually(lambda: kv.states() == set(), "it can be written again, and the state goes")
    eventually(
        lambda: not {key.hex() for key in before[:2]} & {path.stem for path in kv.files()}, "gone there too"
    )
    kv.put_on_disk(4)
    assert kv.sound(integrity) >= 8


@pytest.mark.root
@pytest.mark.parametrize("memory_too", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("state", ["disk_full", "disk_read_only"])
def test_a_daemon_starts_on_a_disk_that_takes_nothing(rig, disk, integrity, state, memory_too):
    """Whatever ended the daemon before: what is in memory and what lies on the disk is served."""
    kv = rig(directory=disk.path / "kv")
    before = kv.put_on_disk(6)
    kv.daemon.stop()
    ballast = disk.fill(leave_bytes=0)
    if state == "disk_read_only":
        disk.remount("ro")
    kv.restart(memory_too=memory_too)
    eventually(lambda: kv.states() == {state}, "the state has its name, before anything is written")
    kv.evict()
    assert all(kv.load(before)), "what it holds is found"
    kv.serves()
    if state == "disk_read_only":
        disk.remount("rw")
    ballast.unlink()
    eventually(lambda: kv.states() == set(), "it can be written, and the state goes")
    kv.put_on_disk(4)
    assert kv.sound(integrity) >= 10


@pytest.mark.root
@pytest.mark.slow
def test_a_slow_disk_slows_nobody_down(rig, tmp_path, integrity):
    """1 MB/s each way: everything is answered from memory meanwhile, and nothing waits for the disk."""
    with cgroup("blkio") as group:
        kv = rig(directory=tmp_path / "kv")
        before = kv.put_on_disk(4)
        kv.evict()
        for way in ("read", "write"):
            try:
                group.set(f"blkio.throttle.{way}_bps_device", f"{numbers_of(tmp_path)} 1000000")
            except OSError as error:
                pytest.skip(f"no throttling of {numbers_of(tmp_path)}: {error}")
        group.add(kv.daemon.pid)
        keys = kv.put(40)
        kv.client.touch(keys)
        kv.client.prefetch(before)
        now = kv.counters()
        assert now["disk_writes_in_flight"] or now["pending_writes"] or now["disk_loads_in_flight"], (
            "it is slow"
        )
        begun = time.monotonic()
        resident = kv.put(4)
        for _ in range(20):
            kv.client.touch(resident)
            assert kv.load(resident, wait_s=0) == [True] * 4
        refused = kv.counters()["no_space"]
        for _ in range(12):  # an eviction storm: several times the pool, and no block waits for its write
            kv.client.touch(kv.put(16))
        now = kv.counters()
        assert now["no_space"] == refused
        assert now["evictions"] and now["disk_written"] < now["creates"] // 2
        print(f"20 rounds beside a slow disk took {time.monotonic() - begun:.3f} s")
        assert all(kv.load(before, wait_s=30.0))
        kv.daemon.kill()
        kv.restart()
        assert kv.sound(integrity) >= 4


def test_too_few_descriptors(rig, integrity):
    """The daemon cannot open a file more: misses meanwhile, and all is well when it can again."""
    kv = rig()
    before = kv.put_on_disk(4)
    kv.evict()
    keys = kv.put(6)
    kv.settled()
    limits = resource.prlimit(kv.daemon.pid, resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        resource.prlimit(kv.daemon.pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # no number below is free
        held.callback(resource.prlimit, kv.daemon.pid, resource.RLIMIT_NOFILE, limits)
        kv.client.touch(keys)
        assert not any(kv.load(before, wait_s=1.0)), "their files cannot be opened"
        assert all(kv.load(keys, wait_s=0)), "memory is served"
    eventually(lambda: all(kv.load(before)), "they come when they can")
    kv.settled()
    eventually(lambda: not kv.states(), "no state is left")
    kv.evict()
    assert kv.sound(integrity) >= 4


@pytest.mark.root
def test_too_little_memory(rig, integrity):
    """The kernel kills the daemon for its memory while the pool grows."""
    with cgroup("memory") as group:
        kv = rig(memory="256MiB")
        kv.put_on_disk(4)  # of a daemon with room: the next one may die before it answers anything
        group.set("memory.limit_in_bytes", str(250 << 20))  # the whole pool and nothing else
        into = ["sh", "-c", f'echo $$ > {group.processes} && exec "$@"', "sh"]
        kv.daemon.command = [*into, *kv.daemon.command]
        with contextlib.suppress(DaemonFailed):  # it may be killed before it is ready
            kv.restart(memory_too=True)
        with tolerated():
            for _ in range(80):
                kv.client.touch(kv.put(16))
        kv.was_killed()
        group.set("memory.limit_in_bytes", "-1")
        kv.restart()
        assert kv.sound(integrity) >= 4


@pytest.mark.alone  # counts the host's slots
def test_eight_daemons_with_queues_on_one_host(daemon, tmp_path):
    """Peers' case 9: small queues, so that the third process starts, and the eighth."""
    before = int(AIO_NOW.read_text())
    rigs = [DiskRig(daemon, tmp_path / f"d{number}", memory="8MiB", start=False) for number in range(8)]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda kv: kv.daemon.start(), rigs))
        for kv in rigs:
            if "direct I/O" in kv.daemon.log():  # not where the test's directory has none
                assert "engine=aio" in kv.daemon.log()
            keys = kv.put_on_disk(2)
            kv.evict()
            assert all(kv.load(keys))
        assert int(AIO_NOW.read_text()) - before <= 8 * 256, "each takes few of the host's slots"
    finally:
        for kv in rigs:
            kv.drop_client()


@pytest.mark.root
@pytest.mark.alone  # takes the host's slots away
def test_no_queue_is_left_on_the_host(rig, integrity):
    """The daemon says so and works with threads."""
    before = AIO_MAX.read_text()
    try:
        AIO_MAX.write_text(AIO_NOW.read_text())
    except OSError as error:
        pytest.skip(f"{AIO_MAX} cannot be written: {error}")
    try:
        kv = rig()
    finally:
        AIO_MAX.write_text(before)
    log = kv.daemon.log()
    assert "engine=threads" in log and "aio-nr" in log and "aio-max-nr" in log, log
    keys = kv.put_on_disk(4)
    kv.evict()
    assert all(kv.load(keys))
    assert kv.sound(integrity) == 4
