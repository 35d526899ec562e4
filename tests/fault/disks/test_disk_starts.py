"""Goal: a daemon that is killed while it starts - while it adopts the table, lists its directories, sweeps
what was left - leaves to the next one what the one before left to it (docs/design.md §12), and what holds for
files holds over restarts. Method: SIGKILL at moments spread over the whole start, each time to the same
directory, with files, memory and leftovers in it; then the whole list of tests/fault/disks/rig.py.
"""

import contextlib
import json
import os
import random
import time

import pytest

from kvstored.cli.main import main
from kvstored.errors import Exit
from tests.conftest import DaemonFailed
from tests.fault.children import eventually
from tests.fault.disks.rig import DiskRig, tolerated


def start_and_kill(kv: DiskRig, after_s: float) -> bool:
    """Whether it had said READY=1 before."""
    try:
        kv.daemon.start(timeout_s=after_s)  # kills it at its deadline
    except DaemonFailed:
        assert kv.daemon.process.returncode == -9, kv.daemon.log()
        return False
    kv.daemon.kill()
    return True


def kill_many_starts(kv: DiskRig, integrity, rounds: int, choose: random.Random) -> None:
    keys = kv.put_on_disk(16)
    kv.evict()
    resident = kv.put_on_disk(8)
    memory_only = kv.put(8)
    kv.drop_client()
    begun = time.monotonic()
    kv.daemon.kill()
    kv.daemon.start()
    whole_start_s = max(0.05, time.monotonic() - begun)
    ready = 0
    kv.daemon.kill()
    for number in range(rounds):
        (kv.directory / "default" / "tmp" / f"{number:016x}.tmp").write_bytes(os.urandom(8192))
        ready += start_and_kill(kv, choose.random() * 1.2 * whole_start_s)
    print(f"{rounds} starts killed, {ready} of them had said READY=1")
    kv.daemon.start()
    assert kv.load(memory_only, wait_s=0) == [True] * 8
    assert kv.load(resident, wait_s=0) == [True] * 8
    assert all(kv.load(keys))
    kv.sound(integrity)


def test_killed_at_many_moments_of_the_start(rig, integrity):
    kill_many_starts(rig(), integrity, 8, random.Random(5))


def test_what_is_not_known_of_a_file_is_not_listed_as_a_number(rig, capsys):
    """Found by its name alone: `ls` told 0 tokens, 0 bytes and layout 255."""
    kv = rig()
    (written,) = kv.put_on_disk(1)
    kv.restart(memory_too=True)

    def listed():
        assert main(["ls", "--dir", str(kv.daemon.dir), "--json"]) == Exit.DONE
        (block,) = json.loads(capsys.readouterr().out)
        return [block[name] for name in ("key", "token_count", "layout_id", "length_bytes", "created_ms")]

    assert listed() == [written.hex(), None, None, None, None]
    assert main(["ls", "--dir", str(kv.daemon.dir)]) == Exit.DONE
    assert "255" not in capsys.readouterr().out.replace(written.hex(), "")
    assert kv.load([written]) == [True]
    _, tokens, _, length, _ = listed()
    assert tokens == 32 and length > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_very_many_moments_of_the_start(rig, integrity, seed):
    kill_many_starts(rig(), integrity, 80, random.Random(seed))


@pytest.mark.parametrize("step", ["remove", "open", "create"])
def test_killed_in_the_first_step_after_the_start(rig, integrity, step):
    """What the first one swept, opened or wrote is done by the next."""
    kv = rig()
    keys = kv.put_on_disk(8)
    kv.evict()
    more = kv.put(4)
    kv.drop_client()
    kv.daemon.kill()
    for number in range(3):
        (kv.directory / "default" / "tmp" / f"{number:016x}.tmp").write_bytes(os.urandom(8192))
    for _ in range(3):
        kv.daemon.env["KVSTORED_FAULTS"] = f"{step}_kill=@1"
        with tolerated(), contextlib.suppress(DaemonFailed):
            kv.daemon.start()
            kv.load(keys)
            kv.client.touch(more)
        kv.was_killed()
        kv.drop_client()
    kv.restart()
    # A busy disk may take longer to open than a daemon waits for it at its start.
    eventually(lambda: all(kv.load(keys)) and all(kv.load(more)), "every block is there")
    kv.sound(integrity)


def test_the_quota_holds_over_restarts(rig, integrity):
    """Peers' case 15: what lies there counts before anything is written, also under a smaller quota."""
    kv = rig(quota="4MiB")
    for _ in range(3):
        kv.put_on_disk(24)
        kv.counted_right()
        kv.restart(kill=True, memory_too=True)
    kv.settled()
    assert kv.counters()["disk_bytes"] > 3 << 20, "what was there is counted"
    kv.counted_right()
    at = kv.daemon.args.index("--disk-quota") + 1
    kv.daemon.args[at] = "2MiB"
    kv.restart()
    kv.settled()
    eventually(lambda: kv.counters()["disk_bytes"] <= 2 << 20, "the smaller quota holds")
    kv.counted_right()
    assert 0 < kv.counters()["disk_bytes"] <= 2 << 20
    kv.put_on_disk(12)
    kv.counted_right()
    assert kv.sound(integrity) >= 1


def test_time_to_live_holds_over_restarts(rig, wait_until):
    kv = rig()
    keys = kv.put(4, ttl_s=3)
    kv.client.touch(keys)
    kv.settled()
    assert len(kv.files()) == 4
    kv.restart(kill=True, memory_too=True)
    wait_until(lambda: not any(kv.load(keys, wait_s=1.0)), "gone when their time is over", 20.0)
    wait_until(lambda: not kv.files(), "and their files when somebody asked", 20.0)
