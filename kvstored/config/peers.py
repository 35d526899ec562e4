"""Where other hosts' daemons are: `NAME=HOST:PORT`, and who may connect.

Owns the grammar. Never resolves a name or opens a socket. Invariant: an Endpoint that exists is an IPv4
address and a port; where one lies off loopback, peers speak TLS or a network of trusted peers holds it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_PEERS = 64
MIN_POOL_BYTES = 16 << 20  # of the cluster's memory, on a host that gives any
_NODE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_ETCD = r"[A-Za-z0-9_.-]+:\d{1,5}"
_CLUSTER = re.compile(rf"etcd://{_ETCD}(?:,{_ETCD}){{0,8}}(?:/[a-z0-9_.-]{{1,63}})?")


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Every address of the host."""
        return ipaddress.IPv4Address(self.host).is_unspecified

    @property
    def on_loopback(self) -> bool:
        return self.address.is_loopback

    @property
    def address(self) -> ipaddress.IPv4Address:
        return ipaddress.IPv4Address(self.host)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Peer:
    node: str
    at: Endpoint

    def __str__(self) -> str:
        return f"{self.node}={self.at}"


def this_host() -> str:
    """A node's name made of the host's."""
    return re.sub(r"[^a-z0-9_.-]", "-", socket.gethostname().lower()).strip("_.-")[:63] or "host"


def node(value: Any) -> str:
    if not isinstance(value, str) or (value and not _NODE.fullmatch(value)):
        raise ValueError("a name of lower case letters, digits and _.- is wanted, at most 63")
    return value


def endpoint(value: Any) -> Endpoint | None:
    """HOST:PORT; nothing of "". Raises ValueError."""
    if value in ("", None):
        return None
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(f"{value!r}: an IPv4 address and a port are wanted, as 127.0.0.1:7400") from None
    if not colon or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{value!r}: {port!r} is no port: 0 to 65535")
    return Endpoint(str(address), int(port))


def peers(value: Any) -> tuple[Peer, ...]:
    """NAME=HOST:PORT, several joined by commas or as a list; a table of NAME = "HOST:PORT"."""
    if isinstance(value, Mapping):
        value = [f"{name}={at}" for name, at in value.items()]
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(text, str) for text in listed):
        raise ValueError("NAME=HOST:PORT is wanted")
    found = []
    for entry in (part.strip() for text in listed for part in text.split(",") if part.strip()):
        name, _, where = entry.partition("=")
        at = endpoint(where)
        if not name or at is None or not at.port or at.everywhere:
            raise ValueError(f"{entry!r}: NAME=HOST:PORT is wanted")
        found.append(Peer(node(name), at))
    if len(found) > MAX_PEERS:
        raise ValueError(f"{len(found)} peers: at most {MAX_PEERS}")
    if twice := [name for name, times in Counter(peer.node for peer in found).items() if times > 1]:
        raise ValueError(f"{twice[0]!r} is named twice")
    return tuple(found)


def cluster(value: Any) -> str:
    """etcd://HOST:PORT[,HOST:PORT…][/NAME]; "" of ""."""
    if value in ("", None):
        return ""
    if not isinstance(value, str) or not _CLUSTER.fullmatch(value):
        raise ValueError("etcd://HOST:PORT[,HOST:PORT...][/NAME] is wanted")
    return value


def network(value: Any) -> ipaddress.IPv4Network | None:
    """A CIDR; nothing of ""."""
    if value in ("", None):
        return None
    try:
        found = ipaddress.IPv4Network(value, strict=False)
    except (ValueError, TypeError):
        raise ValueError(f"{value!r}: an IPv4 network is wanted, as 10.1.2.0/24") from None
    if str(found.network_address) != str(value).partition("/")[0]:
        raise ValueError(f"{value!r} is an address in a network: {found} is the network")
    if not found.prefixlen:
        raise ValueError(f"{value!r} is every address there is: that wants tls_cert, tls_key and tls_ca")
    return found


def why_not(
    node: str, listen: Endpoint | None, known: tuple[Peer, ...], trusted: Any, tls: tuple[str, str, str]
) -> str:
    """What is wrong with these together, "" if nothing is. `tls`: the paths of the certificate, its key and
    the authority."""
    if not node and (listen or known):
        return "node: listen and peer want this daemon's own name among its peers"
    if any(peer.node == node for peer in known):
        return f"peer: {node!r} is this daemon's own name"
    if any(tls) and not all(tls):
        return "tls_cert, tls_key and tls_ca: all three, or none"
    if all(tls):
        why = "trusted_network: names peers that speak without encryption, and tls_cert is given: one of both"
        return why if trusted else ""
    for what, at in (("listen", listen), *((f"peer {peer.node}", peer.at) for peer in known)):
        if at and at.everywhere:
            return f"{what}: {at} is every address of the host: that wants tls_cert, tls_key and tls_ca"
        if at and not at.on_loopback and not (trusted and ipaddress.IPv4Address(at.host) in trusted):
            return (
                f"{what}: {at} is not on loopback, where whoever is on the way could read and change what is "
                "sent: give tls_cert, tls_key and tls_ca, or name the network of peers in trusted_network"
            )
    return ""


def why_no_pool(memory: int, tls: tuple[str, str, str]) -> str:
    """What is wrong with giving the cluster's pool so many bytes, "" if nothing is."""
    if 0 < memory < MIN_POOL_BYTES:
        return f"cluster_memory: {memory} bytes, the least is {MIN_POOL_BYTES}; 0 joins without a pool"
    if memory and any(tls):
        return "cluster_memory: Mooncake has no TLS: 0 joins without a pool, for peers alone"
    return ""
