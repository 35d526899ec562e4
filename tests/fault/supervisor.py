"""Stands for the service manager: starts the daemon, listens to what it says, keeps its descriptors and hands
them to the next one.

Owns the notify socket, a thread that reads it, and the descriptors in its store. Speaks sd_notify(3) and
sd_listen_fds(3), no more. Run as a program it is the step between fork and exec that puts the descriptors
where the daemon looks for them.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

FIRST_FD = 3


class Supervisor:
    def __init__(self, daemon, watchdog_s: float = 0) -> None:
        """`daemon` is tests.conftest.Daemon, not started: its directory, arguments and log are used."""
        self._environ = {"WATCHDOG_USEC": str(int(watchdog_s * 1e6))} if watchdog_s else {}
        self.daemon = daemon
        self.said: list[str] = []
        self._store: list[tuple[str, int]] = []  # systemd allows one name several times
        self._path = str(daemon.dir.parent / (daemon.dir.name + ".supervisor"))
        self._heard = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(self._path)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Starts the daemon with what is in the store; returns at its READY=1."""
        with self._heard:
            self.said.clear()
            names, fds = [name for name, _ in self._store], [fd for _, fd in self._store]
        command = [sys.executable, "-m", "kvstored", *self.daemon.args]
        if fds:
            command = [sys.executable, __file__, ",".join(map(str, fds)), ":".join(names), *command]
        with open(self.daemon.log_path, "ab") as log:
            self.daemon.process = subprocess.Popen(
                command, cwd=Path(__file__).parents[2], stderr=log, stdout=log, pass_fds=fds,
                env={**os.environ, "NOTIFY_SOCKET": self._path, **self._environ},
            )  # fmt: skip
        self.wait(lambda: any(text.startswith("READY=1") for text in self.said))
        self.daemon._note_segments()

    def restart(self, kill: bool = False) -> None:
        if kill:
            self.daemon.kill()
        else:
            self.daemon.stop()
        self.start()

    def kept(self) -> dict[str, int]:
        """name -> descriptor, of what is in the store now."""
        with self._heard:
            return dict(self._store)

    def offer(self, name: str, fd: int) -> None:
        """Puts something into the store that the daemon has not sent."""
        with self._heard:
            self._store.append((name, os.dup(fd)))

    def wait(self, condition, timeout_s: float = 60.0) -> None:
        with self._heard:
            assert self._heard.wait_for(condition, timeout_s), f"{self.said}\n{self.daemon.log()}"

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        os.unlink(self._path)
        for _, fd in self._store:
            os.close(fd)

    def _listen(self) -> None:
        while True:
            message, control, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(64 * 4))
            if not message:
                return
            fields = dict(line.split("=", 1) for line in message.decode().splitlines())
            fds = array.array("i")
            for _, _, payload in control:
                fds.frombytes(payload)
            with self._heard:
                self._obey(fields, list(fds))
                self.said.append(message.decode())
                self._heard.notify_all()

    def _obey(self, fields: dict[str, str], fds: list[int]) -> None:
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            self._store += [(name, fd) for fd in fds]
        elif fields.get("FDSTOREREMOVE") == "1":
            for _, fd in [entry for entry in self._store if entry[0] == name]:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._store = [entry for entry in self._store if entry[0] != name]


def main() -> None:
    numbers, names, *command = sys.argv[1:]
    # First all out of the way, then each to its place: they may lie on each other's.
    fds = [os.dup(int(number)) for number in numbers.split(",")]
    high = [os.dup2(fd, 500 + index) for index, fd in enumerate(fds)]
    for index, fd in enumerate(high):
        os.dup2(fd, FIRST_FD + index)
    os.closerange(FIRST_FD + len(high), 600)
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(high)), LISTEN_FDNAMES=names)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
