"""Several hosts on one machine: a network namespace for each where this user may make one, else an address of
loopback for each. Daemons in them that are each other's peers, over TLS where there is an `openssl` command.

    with hosts_here.running("a", "b", "c") as hosts:
        client = kvclient.connect(dir=hosts["a"].dir)

Everything that was made goes with the block: processes, namespaces, files, shared memory. A namespace has no
way out, so what listens in it on every address is reached by nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import test_ca

PORT, READY_S, END_S = 7400, 60.0, 20.0
UNPACKED = Path(__file__).resolve().parents[1] / "build/cluster/system"  # by .ci/cluster


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Who is where. `isolated`: in namespaces."""

    def __init__(self, names: tuple[str, ...], isolated: bool) -> None:
        self._made: list[str] = []
        self._names = names
        self.why = "" if isolated else "loopback was asked for"
        self.isolated = isolated and self._isolate()

    def _isolate(self) -> bool:
        if not shutil.which("ip"):
            self.why = "no ip command"
            return False
        try:
            switch = self._namespace("switch")
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for name in self._names:
                host = self._namespace(name)
                other = ["peer", "name", f"to-{name}", "netns", switch]
                _ip("-n", host, "link", "add", "eth0", "type", "veth", *other)
                _ip("-n", switch, "link", "set", "dev", f"to-{name}", "master", "br0", "up")
                _ip("-n", host, "addr", "add", f"{self.address(name, True)}/24", "dev", "eth0")
                _ip("-n", host, "link", "set", "eth0", "up")
                _ip("-n", host, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            self.why = error.stderr.decode(errors="replace").strip()[:100]
            return False
        return True

    def _namespace(self, name: str) -> str:
        full = f"kv{os.getpid()}{name}"
        _ip("netns", "add", full)
        self._made.append(full)
        return full

    def address(self, name: str, isolated: bool | None = None) -> str:
        number = self._names.index(name) + 1
        here = self.isolated if isolated is None else isolated
        return f"10.77.0.{number}" if here else f"127.0.0.{number}"

    def inside(self, name: str) -> list[str]:
        """What stands before a command that is to run there."""
        return ["ip", "netns", "exec", f"kv{os.getpid()}{name}"] if self.isolated else []

    def cut_off(self, name: str) -> None:
        """What the host sends, and what is sent to it, is dropped; nobody is told. Raises RuntimeError."""
        hooks = (("input", "iifname"), ("output", "oifname"))
        rules = ["add table inet cut"]
        for hook, which in hooks:
            rules += [f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}"]
            rules += [f"add rule inet cut {hook} {which} eth0 drop"]
        self._nft(name, "; ".join(rules))

    def join_again(self, name: str) -> None:
        self._nft(name, "delete table inet cut")

    def _nft(self, name: str, rules: str) -> None:
        program, libraries = shutil.which("nft"), ""
        if program is None and (UNPACKED / "usr/sbin/nft").exists():
            program = str(UNPACKED / "usr/sbin/nft")
            places = [UNPACKED / part / "x86_64-linux-gnu" for part in ("usr/lib", "lib")]
            libraries = ":".join(map(str, places))
        if not self.isolated or program is None:
            why = self.why or "no nft: apt install nftables, or .ci/cluster"
            raise RuntimeError(f"no partition here ({why})")
        environment = {**os.environ, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}
        done = subprocess.run(
            [*self.inside(name), program, rules], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"nft: {done.stderr.strip()[:200]}")

    def slow(self, name: str, bytes_per_s: float) -> None:
        """What the host sends goes no faster. Only where hosts have namespaces."""
        if not self.isolated:
            raise RuntimeError(f"no namespaces here ({self.why}), so no slow link")
        rate = ["rate", f"{int(bytes_per_s * 8)}bit", "burst", "256kb", "latency", "50ms"]
        where = ["-n", f"kv{os.getpid()}{name}", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        subprocess.run(["tc", *where, *rate], check=True, capture_output=True)

    def close(self) -> None:
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self._made.clear()


class Host:
    """One daemon and where it runs. Not started."""

    def __init__(self, name: str, base: Path, network: Network, peers: Mapping[str, str], args: list[str]):
        self.name, self.network, self._base = name, network, base
        self.dir = base / name
        self.dir.mkdir(mode=0o700)
        self.at = peers[name]
        self.command = [*network.inside(name), sys.executable, "-m", "kvstored", "serve"]
        self.command += ["--dir", str(self.dir), "--discard", "--node", name, "--listen", self.at, *args]
        for other, at in peers.items():
            if other != name:
                self.command += ["--peer", f"{other}={at}"]
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises SystemExit with the daemon's words if it does not come up."""
        path = self._base / f"{self.name}.ready"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(path))
            ready.settimeout(READY_S)
            with open(self._base / f"{self.name}.log", "ab") as log:
                self.daemon = subprocess.Popen(
                    self.command, env={**os.environ, "NOTIFY_SOCKET": str(path)}, stdout=log, stderr=log,
                    cwd=Path(__file__).resolve().parent.parent,
                )  # fmt: skip
            try:
                while b"READY=1" not in ready.recv(4096):
                    pass
            except TimeoutError:
                raise SystemExit((self._base / f"{self.name}.log").read_text()) from None

    def kill(self) -> None:
        assert self.daemon
        self.daemon.kill()
        self.daemon.wait()

    def freeze(self) -> None:
        assert self.daemon
        self.daemon.send_signal(signal.SIGSTOP)
        os.waitpid(self.daemon.pid, os.WUNTRACED)

    def thaw(self) -> None:
        assert self.daemon
        self.daemon.send_signal(signal.SIGCONT)

    def peers(self) -> dict[str, dict]:
        """By name, as `kvstored peers --json` has them."""
        asked = [sys.executable, "-m", "kvstored", "peers", "--dir", str(self.dir), "--json"]
        said = subprocess.run(asked, capture_output=True, text=True).stdout
        return {peer["node"]: peer for peer in json.loads(said)["peers"]} if said else {}

    def end(self) -> None:
        if self.daemon and self.daemon.poll() is None:
            self.thaw()
            self.daemon.terminate()
            try:
                self.daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
        # Of a daemon that was killed the pool is left, and its directory names it.
        forget = [sys.executable, "-m", "kvstored", "stop", "--discard", "--dir", str(self.dir)]
        subprocess.run(forget, capture_output=True)


@contextlib.contextmanager
def running(
    *names: str,
    memory: str = "256MiB",
    tls: bool | None = None,
    isolated: bool = True,
    args: list[str] | None = None,
) -> Iterator[dict[str, Host]]:
    """Daemons that know each other, up when it is entered. `tls`: by default where it can be had, or must."""
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-hosts-")))
        network = Network(names, isolated)
        stack.callback(network.close)
        (base / "salt").write_text("all hosts have this file")
        (base / "salt").chmod(0o600)
        shared = f"default:salt=file:{base}/salt:share=read"
        common = ["--memory", memory, "--namespaces", shared, *(args or [])]
        secured = bool(shutil.which("openssl")) if tls is None else tls
        if secured:
            test_ca.authority(base / "tls")
        elif network.isolated:
            common += ["--trusted-network", "10.77.0.0/24"]
        peers = {name: f"{network.address(name)}:{_port(network, name)}" for name in names}
        hosts = {}
        for name in names:
            flags = []
            if secured:
                certificate, key = test_ca.certificate(base / "tls", name)
                flags = ["--tls-cert", str(certificate), "--tls-key", str(key)]
                flags += ["--tls-ca", str(base / "tls/ca.pem")]
            hosts[name] = Host(name, base, network, peers, common + flags)
            stack.callback(hosts[name].end)
        for host in hosts.values():
            host.start()
        yield hosts


def _port(network: Network, name: str) -> int:
    if network.isolated:
        return PORT
    with socket.socket() as probe:
        probe.bind((network.address(name), 0))
        return probe.getsockname()[1]
