"""Several daemons that know each other, on loopback addresses; and a stream in between that a test can
spoil."""

import contextlib
import io
import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvstored.cli.main import main
from tests.conftest import wait_for


def free_port(host: str = "127.0.0.1") -> int:
    """Below those that the kernel gives to connections: a daemon that is killed shall find its port free."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = first - 1 - secrets.randbelow(min(first - 1024, 20000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


class Hosts:
    """`hosts[i]` is a daemon; each is the others' peer. Not started: start() does, so that a test can place
    something in between first."""

    def __init__(self, daemon: Callable, tmp_path, count: int = 2, memory: str = "64MiB"):
        salt = tmp_path / "salt"
        salt.write_text("the same on all hosts of this test")
        salt.chmod(0o600)
        self.ports = [free_port(f"127.0.0.{i + 1}") for i in range(count)]
        self.addresses = [f"127.0.0.{i + 1}:{port}" for i, port in enumerate(self.ports)]
        self.made = []
        for i in range(count):
            known = [f"n{k}={at}" for k, at in enumerate(self.addresses) if k != i]
            args = ["--node", f"n{i}", "--listen", self.addresses[i]]
            args += [word for peer in known for word in ("--peer", peer)]
            args += ["--namespaces", f"default:salt=file:{salt}:share=read"]
            self.made.append(daemon(memory, args, start=False))

    def reroute(self, host: int, peer: int, address: str) -> None:
        """`host` reaches `peer` there."""
        args = self.made[host].args
        args[args.index(f"n{peer}={self.addresses[peer]}")] = f"n{peer}={address}"

    def speak_tls(self, certificates: Path) -> "Hosts":
        """With ca.pem and n<i>.pem, n<i>.key of that directory."""
        for i, host in enumerate(self.made):
            host.args += ["--tls-cert", str(certificates / f"n{i}.pem")]
            host.args += ["--tls-key", str(certificates / f"n{i}.key")]
            host.args += ["--tls-ca", str(certificates / "ca.pem")]
        return self

    def start(self, *which: int) -> "Hosts":
        for i in which or range(len(self.made)):
            self.made[i].start()
        return self

    def __getitem__(self, i: int):
        return self.made[i]

    def peers(self, i: int) -> dict:
        """`kvstored peers --json` there: by peer's name, and "server"."""
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = main(["peers", "--json", "--dir", str(self.made[i].dir)])  # here: it is asked for often
        assert code in (0, 1) and not errors.getvalue(), errors.getvalue()
        said = json.loads(printed.getvalue())
        return {peer["node"]: peer for peer in said["peers"]} | {"server": said["server"]}

    def wait_up(self, wait_until) -> "Hosts":
        """Each has a connection to each, and was told what it has."""

        def up(i: int) -> bool:
            peers = [peer for node, peer in self.peers(i).items() if node != "server"]
            return all(peer["state"] == "up" and peer["complete"] for peer in peers)

        for i in range(len(self.made)):
            wait_until(lambda i=i: up(i))
        return self


def told(client, keys) -> None:
    """Waits until word of them has come: what was just put elsewhere is a miss here until then."""
    wait_for(lambda: all(client.lookup(keys, peers=True).states), "word of them came")


class Proxy:
    """A stream to an address that a test can change: `change(data)` gets what the far end sends. While `cut`
    is not set, nothing passes and nobody is told."""

    def __init__(self, to: str):
        host, _, port = to.partition(":")
        self.to = (host, int(port))
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.cut = threading.Event()
        self.cut.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        self.dropped = 0  # connections that ended by forget()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.cut.wait()
            try:
                far = socket.create_connection(self.to, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._pairs += [near, far]
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    self.cut.wait()
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is near and near in self._forgotten:
                        self.dropped += 1
                        return
                    (far if ready is near else near).sendall(data if ready is near else self.change(data))
        except (OSError, ValueError):
            return
        finally:
            near.close()
            far.close()

    def break_off(self) -> None:
        """Ends all connections there are; new ones are welcome."""
        for connection in self._pairs:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """The connections there are stand until something more is asked on one: then it is gone, and what was
        asked with it. So it is with one that the other end closed a moment before; new ones are welcome."""
        self._forgotten.update(self._pairs)

    def close(self) -> None:
        self._closed = True
        self.cut.set()
        for connection in (self._listener, *self._pairs):
            connection.close()
