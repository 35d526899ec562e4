"""Other hosts' daemons: the port they read from, and the tier that fetches from them, per shared namespace.

Owns the native server and tiers (`native/core/peer/`), where all bytes move; here they are configured, and
their state is told. Invariants: a namespace that is not shared is known to no peer; a peer's address comes
from the configuration or the cluster's membership, and of both by the same rules; all stop before the stores
close.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from kvstored import _core, log
from kvstored.config.config import Config
from kvstored.config.peers import Endpoint, Peer, endpoint, node, why_not
from kvstored.errors import ConfigError, StoreError
from kvstored.process.limits import members_within
from kvstored.telemetry.problems import Degraded

POOL = "pool"
BY_ITSELF = Endpoint("127.0.0.1", 0)  # where a daemon listens that was told nothing but a cluster


def address_towards(etcd: str) -> str:
    """This host's address on the way to the first of these HOST:PORT that there is a way to, "" if there is
    none: no network yet, or nobody who knows the name."""
    for where in etcd.split(","):
        host, _, port = where.rpartition(":")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
                probe.connect((host, int(port)))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def listening_at(config: Config) -> Endpoint | None:
    """Where other hosts read: as it is configured, or, for a daemon that joins by its cluster's name alone,
    on the way to etcd, if others may be spoken to there. None: nowhere."""
    if not config.cluster or config.listen != BY_ITSELF:
        return config.listen
    address = address_towards(config.etcd)
    if not address:
        log.warning("no_way_to_etcd", etcd=config.etcd, why="until it is started anew no host reads from it")
        return None
    found = Endpoint(address, 0)
    trusted = config.trusted_network
    allowed = config.tls_cert or found.on_loopback or (trusted and found.address in trusted)
    return found if allowed else None


def held_port() -> socket.socket:
    """On loopback, bound and never listening: a port that is nobody else's as long as this is open. Who is
    told of it listens there (SO_REUSEADDR), and while nobody does, who connects is refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _certificates(config: Config) -> tuple[str, str, str]:
    """The paths, of files that can be read more than once. Raises ConfigError."""
    for field, path in zip(("tls_cert", "tls_key", "tls_ca"), config.tls, strict=True):
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            raise ConfigError(f"{field}: {path}: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{field}: {path} is no file")
        if field == "tls_key" and mode & 0o007:
            raise ConfigError(f"tls_key: {path} has mode {stat.S_IMODE(mode):04o}: chmod o-rwx")
    return config.tls


class Peers:
    def __init__(self, config: Config, stores: Mapping[str, Any], salts: Sequence[bytes]) -> None:
        """`salts`: of the namespaces, in their order. Raises ConfigError for certificates that are none."""
        self._tls: Any = None
        if config.tls_cert and (config.peer or config.listen):
            try:
                self._tls = _core.PeerTls(*_certificates(config))
            except StoreError as error:
                raise ConfigError(str(error)) from error
        self._config = config
        self._at = listening_at(config)
        self._server: Any = None
        self._tiers: dict[str, Any] = {}
        self._members: dict[str, Endpoint] = {}  # peers by membership
        self.salts = {namespace.name: salt for namespace, salt in zip(config.namespaces, salts, strict=True)}
        if self._at:
            self._server = self._make_server(self._at, [peer.node for peer in config.peer], self._tls, stores)
        # Its own fabric reads on a listener of its own: plain, on loopback, and nobody else.
        self._inner: Any = None
        if config.cluster:
            self._inner = self._make_server(BY_ITSELF, [POOL], None, stores)
        # The cluster's pool is one more peer, on loopback: the process beside this daemon (kvstored.cluster).
        self._held = held_port() if config.cluster and config.cluster_memory else None
        self.pool_port: int = self._held.getsockname()[1] if self._held else 0
        addresses = [_core.PeerAddress(peer.node, peer.at.host, peer.at.port) for peer in config.peer]
        if self.pool_port:
            addresses.append(_core.PeerAddress(POOL, "127.0.0.1", self.pool_port, tells=False, places=True))
        if config.peer or config.cluster:
            for name in config.shared:
                self._tiers[name] = _core.PeerTier(
                    stores[name], config.node, self.salts[name], addresses, self._tls,
                    takes=config.namespace(name).share == "read-write",
                )  # fmt: skip
        if (config.peer or config.listen) and not config.shared:
            log.warning("nothing_shared", why="no namespace has a share: peers see none of them")

    def _make_server(self, at: Endpoint, peers: list[str], tls: Any, stores: Mapping[str, Any]) -> Any:
        trusted = self._config.trusted_network
        network = (int(trusted.network_address), int(trusted.netmask)) if trusted else (0, 0)
        server = _core.PeerServer(self._config.node, at.host, at.port, peers, *network, tls)
        for name in self._config.shared:
            server.share(stores[name], self.salts[name])
        return server

    @property
    def listening(self) -> str:
        return f"{self._at.host}:{self._server.port}" if self._at and self._server else ""

    @property
    def inner(self) -> str:
        """Where this daemon's fabric reads; after start()."""
        return f"127.0.0.1:{self._inner.port}"

    def told(self, towards: str) -> str:
        """Where other hosts are told to read; "" if they cannot. After start(). `towards`: this host's
        address on the way to etcd, "" without one."""
        if not self._at or not self._server:
            return ""
        host = towards if self._at.everywhere else self._at.host
        return f"{host}:{self._server.port}" if host else ""

    def members_are(self, told: Mapping[str, str]) -> None:
        """Where the cluster's hosts read, by node: those that may be spoken to are peers from now on, and
        those that were and are not named any more are none. The configuration's own peers stay."""
        wanted = self._acceptable(told) if self._server else {}
        for name in sorted(self._members.keys() - wanted.keys()):
            for tier in self._tiers.values():
                tier.leave(name)
        joined = {}
        for name, at in sorted(wanted.items()):
            why = "there are as many peers as there may be"
            try:
                if all(tier.join(name, at.host, at.port) for tier in self._tiers.values()):
                    joined[name] = at
                    continue
            except RuntimeError as error:  # no thread for it; the others are joined all the same
                why = str(error)
            log.warning("peer_not_joined", peer=name, why=f"{why}: until the membership changes")
            for tier in self._tiers.values():  # nor where there was room
                tier.leave(name)
        if self._server:
            self._server.welcome(sorted(joined))
        if joined != self._members:
            log.info("members", peers={name: str(at) for name, at in joined.items()})
        self._members = joined

    def _acceptable(self, told: Mapping[str, str]) -> dict[str, Endpoint]:
        """By the rules of a configured peer, and of loopback only where etcd itself is there: another host's
        loopback is not this one's."""
        config, found = self._config, {}
        known = {"", config.node, POOL, *(peer.node for peer in config.peer)}
        one_machine = config.etcd.startswith(("127.", "localhost:"))
        for name, where in told.items():
            try:
                at = endpoint(where)
                peer = Peer(node(name), at) if at and at.port else None
            except ValueError:
                continue
            if peer is None or name in known or (peer.at.on_loopback and not one_machine):
                continue
            if not why_not(config.node, config.listen, (peer,), config.trusted_network, config.tls):
                found[name] = peer.at
        return dict(sorted(found.items())[: members_within(config)])

    @property
    def tiers(self) -> Mapping[str, Any]:
        """By namespace; native."""
        return self._tiers

    @property
    def transport(self) -> str:
        return "tls" if self._tls else "tcp"

    def read_certificates(self, config: Config) -> None:
        """As they are now; connections that were made with others end, those at work when they have answered.
        Raises ConfigError, and what was read before stays."""
        if not self._tls:
            return
        try:
            self._tls.read_again(*_certificates(config))
        except StoreError as error:
            raise ConfigError(str(error)) from error
        if self._server:
            self._server.renew()

    def watch(self, degraded: Degraded) -> None:
        """Brings the degraded state of this daemon's certificate up to date: it runs out by itself."""
        why = self._tls.doubt(self._config.node) if self._tls else ""
        degraded.put(bool(why), "certificate_refused", text=why)

    def placer_ended(self) -> None:
        """The fabric's process: what it was lent of the pools is over."""
        for tier in self._tiers.values():
            tier.placer_ended()

    def start(self) -> None:
        """Raises StoreError if the port is not to be had."""
        for server in filter(None, (self._server, self._inner)):
            server.start()
        for tier in self._tiers.values():
            tier.start()
        if self._server or self._tiers:
            log.info("peers", listen=self.listening, namespaces=len(self._tiers), transport=self.transport)

    def close(self) -> None:
        """Cuts the connections: what is half fetched is given up."""
        for tier in self._tiers.values():
            tier.stop()
        for server in filter(None, (self._server, self._inner)):
            server.stop()
        if self._held:
            self._held.close()

    def server_stats(self) -> dict[str, int]:
        made = self._server.stats() if self._server else {}
        return made | {"tls": int(self.transport == "tls")} if self._server or self._tiers else made

    def stats(self) -> list[tuple[str, dict[str, Any]]]:
        """(namespace, a peer's figures and texts)"""
        return [
            (name, peer | {"up": int(peer["state"] == "up")})
            for name, tier in self._tiers.items()
            for peer in tier.stats()
        ]
