"""Other hosts' daemons: the port they read from, and the tier that fetches from them, per shared namespace.

Owns the native server and tiers (`native/core/peer/`), where all bytes move; here they are configured, and
their state is told. Invariants: a namespace that is not shared is known to no peer; a peer's address comes
from the configuration alone; both stop before the stores close.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from kvstored import _core, log
from kvstored.config.config import Config
from kvstored.errors import ConfigError, StoreError

POOL = "pool"


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


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
        # The cluster's pool is one more peer, on loopback: the process beside this daemon (kvstored.cluster).
        self.pool_port = free_port() if config.cluster else 0
        self._server: Any = None
        self._host = config.listen.host if config.listen else ""
        self._tiers: dict[str, Any] = {}
        self.salts = salt_of = {
            namespace.name: salt for namespace, salt in zip(config.namespaces, salts, strict=True)
        }
        if config.listen:
            trusted = config.trusted_network
            self._server = _core.PeerServer(
                config.node,
                config.listen.host,
                config.listen.port,
                [*(peer.node for peer in config.peer), *([POOL] if config.cluster else ())],
                int(trusted.network_address) if trusted else 0,
                int(trusted.netmask) if trusted else 0,
                self._tls,
            )
            for name in config.shared:
                self._server.share(stores[name], salt_of[name])
        if config.peer or config.cluster:
            addresses = [(peer.node, peer.at.host, peer.at.port, True) for peer in config.peer]
            if config.cluster:
                addresses.append((POOL, "127.0.0.1", self.pool_port, False))  # asked: it does not tell
            for name in config.shared:
                self._tiers[name] = _core.PeerTier(
                    stores[name], config.node, salt_of[name], addresses, self._tls
                )
        if (config.peer or config.listen) and not config.shared:
            log.warning("nothing_shared", why="no namespace has share = read: peers see none of them")

    @property
    def listening(self) -> str:
        return f"{self._host}:{self._server.port}" if self._server else ""

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

    def start(self) -> None:
        """Raises StoreError if the port is not to be had."""
        if self._server:
            self._server.start()
        for tier in self._tiers.values():
            tier.start()
        if self._server or self._tiers:
            log.info("peers", listen=self.listening, namespaces=len(self._tiers), transport=self.transport)

    def close(self) -> None:
        """Cuts the connections: what is half fetched is given up."""
        for tier in self._tiers.values():
            tier.stop()
        if self._server:
            self._server.stop()

    def server_stats(self) -> dict[str, int]:
        return self._server.stats() if self._server else {}

    def stats(self) -> list[tuple[str, dict[str, Any]]]:
        """(namespace, a peer's figures and texts)"""
        return [
            (name, peer | {"up": int(peer["state"] == "up")})
            for name, tier in self._tiers.items()
            for peer in tier.stats()
        ]
