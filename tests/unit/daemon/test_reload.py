"""A reload of a correct file is never refused for what must wait for a restart; and its supervisor hears when
it is over.

Method: the real loader and plan on a file, and a supervisor's socket; nothing is applied to a daemon.
"""

import socket
import threading

import pytest

from kvstored.config.sources import load
from kvstored.process.notify import notify
from kvstored.process.reload import Reload
from kvstored.telemetry.problems import Degraded

BEFORE = 'memory = "1GiB"\ndisk = ["/a"]\ndisk_quota = "8GiB"\n'


@pytest.mark.parametrize(
    "after",
    [
        'memory = "1GiB"\n',
        BEFORE.replace("8GiB", "2GiB") + '[namespaces.default]\ndisk_quota = "1GiB"\n',
    ],
)
def test_a_quota_that_fits_only_after_the_restart_waits_for_it(tmp_path, after):
    file = tmp_path / "kvstored.toml"
    before = BEFORE + '[namespaces.default]\ndisk_quota = "4GiB"\n'
    file.write_text(before)
    reload = Reload(load({}, {}, str(file)), Degraded(lambda entry, holds: None))
    reload.can("disk_quota", "log_level")
    file.write_text('log_level = "debug"\n' + after)
    found = {change.name: change.applied for change in reload.again()}
    assert found["disk_quota"] is False and found["log_level"] is True
    assert reload.config.disk_quota == 8 << 30 and reload.config.log_level == "debug"
    assert reload.refused_total == 0


def test_a_quota_that_fits_changes_at_once(tmp_path):
    file = tmp_path / "kvstored.toml"
    file.write_text(BEFORE)
    reload = Reload(load({}, {}, str(file)), Degraded(lambda entry, holds: None))
    reload.can("disk_quota")
    file.write_text(BEFORE.replace("8GiB", "2GiB"))
    assert [(change.name, change.applied) for change in reload.again()] == [("disk_quota", True)]


def test_word_that_it_is_ready_waits_for_a_supervisor_that_is_busy(tmp_path, monkeypatch):
    """It is said once: lost, the daemon that serves would be killed at TimeoutStartSec."""
    monkeypatch.setattr("kvstored.process.notify.TIMEOUT_S", 60.0)
    said = threading.Event()

    class Told(str):
        def encode(self):
            said.set()
            return super().encode()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path := str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        while notify("WATCHDOG=1"):  # until its queue is full: those do not wait
            pass

        def hear():
            said.wait(60)
            while b"READY=1" not in supervisor.recv(4096):
                pass

        supervisor.settimeout(60)
        hearing = threading.Thread(target=hear, daemon=True)
        hearing.start()
        assert notify(Told("READY=1\nSTATUS=x"))
        hearing.join(60)
        assert not hearing.is_alive()
