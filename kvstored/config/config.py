"""The daemon's configuration: one frozen object, every field with a meaning, a unit, a default and bounds.

Owns the field table and the bounds. Never reads a file or the environment: that is sources.py. Invariant: a
Config that exists is within all bounds; everything else is a ConfigError that names field, value and limit.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from kvstored.config.fields import described as _field
from kvstored.config.fields import directories as _directories
from kvstored.config.fields import path as _path
from kvstored.config.fields import seconds as _seconds
from kvstored.config.fields import text as _text
from kvstored.config.fields import whole as _whole
from kvstored.config.fields import yes as _yes
from kvstored.config.namespaces import Namespace
from kvstored.config.namespaces import parse as parse_namespaces
from kvstored.config.peers import Endpoint, Peer
from kvstored.config.peers import cluster as _cluster
from kvstored.config.peers import endpoint as _endpoint
from kvstored.config.peers import network as _network
from kvstored.config.peers import node as _node
from kvstored.config.peers import peers as _peers
from kvstored.config.peers import this_host as _this_host
from kvstored.config.peers import why_no_pool as _why_no_pool
from kvstored.config.peers import why_not as _why_no_peers
from kvstored.config.units import format_size, parse_size
from kvstored.errors import ConfigError
from kvstored.log import LEVELS

MIN_PART_BYTES = 2 << 20  # of a namespace, in memory and on disk
# A Unix socket's address holds 107 bytes; the longest name in the directory is "kvstored.sock".
MAX_DIR_BYTES = 107 - len("/kvstored.sock")
BLOCK_BYTES_GUESS = 64 << 10  # for the default of max_blocks: one record per so much memory


def _show_namespaces(namespaces: tuple[Namespace, ...]) -> str:
    return "{ " + ", ".join(f"{namespace.name} = {namespace.shown()}" for namespace in namespaces) + " }"


@dataclass(frozen=True)
class Config:
    """What the daemon runs with. Built by load(), or directly by tests; either way the bounds hold."""

    dir: str = _field(
        "runtime directory: sockets, lock, state.json. Default: the first of $KVSTORED_DIR, /run/kvstored "
        "if it can be written, $XDG_RUNTIME_DIR/kvstored",
        "",
        _path,
    )
    memory: int = _field(
        "size of the pool of shared memory, all namespaces together; rounded down to 2 MiB per namespace",
        1 << 30,
        parse_size,
        unit="bytes",
        low=8 << 20,
        high=16 << 40,
        show=format_size,
    )
    max_blocks: int = _field(
        "most blocks at a time, all namespaces together; fixed at start, at most 160 bytes of index each. "
        "0: one per 64 KiB of memory, at most 1,048,576",
        0,
        _whole,
        unit="blocks",
        low=0,
        high=1 << 24,
    )
    pool: str = _field(
        "what the pool is made of: named POSIX shared memory, or sealed memory without a name (memfd), which "
        "no client can truncate and the service manager keeps over restarts",
        "shm",
        _text,
        choices=("shm", "memfd"),
    )
    pool_dir: str = _field(
        "a directory on a tmpfs or hugetlbfs that holds the pool. Default: /run/kvstored-pool if a tmpfs "
        "with huge pages is mounted there, else /dev/shm",
        "",
        _path,
    )
    huge_after_s: int = _field(
        "seconds from when the pool is in memory until the daemon makes it of huge pages where the file "
        "system did not, with a fifth of a processor (Linux 6.6 or newer); 0: never",
        30, _whole, unit="seconds", low=0, high=86400,
    )  # fmt: skip
    namespaces: tuple[Namespace, ...] = _field(
        "the isolated parts of the store: a table each with memory (a share or a size; absent: the rest), "
        "disk_quota, readers, writers (users and @groups), salt and share (none, read, read-write: whether "
        "peers may). On one line: "
        "NAME[=MEMORY][:FIELD=VALUE]...,... with lists joined by +",
        (Namespace("default", 1.0),),
        parse_namespaces,
        show=_show_namespaces,
    )
    disk: tuple[str, ...] = _field(
        "directories of the disk tier, at most 16, on one line joined by commas; blocks are spread over them "
        "by key; none: no disk tier",
        (),
        _directories,
        show=",".join,
    )
    disk_shared: str = _field(
        "a directory that daemons of several hosts have mounted: of namespaces with share = read each keeps "
        "blocks in DIR/<node>, as one more directory of their disk tier, and reads what the others keep",
        "", _path,
    )  # fmt: skip
    disk_quota: int = _field(
        "most bytes on disk, all directories and namespaces together",
        0, parse_size, unit="bytes", low=0, high=1 << 50, show=format_size,
    )  # fmt: skip
    disk_mounted: bool = _field(
        "whether each directory in disk must be on another file system than /, so that a disk that is not "
        "mounted does not fill the root file system",
        False, _yes, show=lambda yes: "yes" if yes else "no",
    )  # fmt: skip
    disk_fanout: str = _field(
        "directories below each of them: LEVELSxDIGITS of the key; fixed for what lies there",
        "2x1",
        _text,
        choices=tuple(f"{levels}x{digits}" for levels in (1, 2, 3) for digits in (1, 2, 3)),
    )
    disk_files: int = _field(
        "most files on disk, all namespaces together; 60 bytes of memory each",
        1_000_000, _whole, unit="files", low=1, high=1 << 27,
    )  # fmt: skip
    disk_write_priority: int = _field(
        "blocks of this priority and above are written to disk at once, others at their second use",
        70, _whole, low=0, high=100,
    )  # fmt: skip
    disk_pending_writes: int = _field(
        "most blocks of a namespace that wait to be written; of more, the least valuable is not; 0: all",
        0, _whole, unit="blocks", low=0, high=1 << 20,
    )  # fmt: skip
    disk_daily_writes: int = _field(
        "most bytes written to disk a day (UTC), against wear, all namespaces together; 0: no limit",
        0, parse_size, unit="bytes", low=0, high=1 << 50, show=format_size,
    )  # fmt: skip
    keep_corrupt: bool = _field(
        "whether a file that does not match its checksums is moved to aside/ instead of removed",
        False, _yes, show=lambda yes: "yes" if yes else "no",
    )  # fmt: skip
    scrub_rate: int = _field(
        "bytes of memory a second whose checksums are verified in the background; 0: only on request",
        0, parse_size, unit="bytes", low=0, high=1 << 34, show=format_size,
    )  # fmt: skip
    state_dir: str = _field(
        "directory for what must outlive a reboot, as the disk tier does: generated salts. Default: "
        "$STATE_DIRECTORY (systemd), else the runtime directory",
        "",
        _path,
    )
    max_sessions: int = _field("most client processes attached at a time", 256, _whole, low=1, high=4096)
    max_pins: int = _field(
        "most blocks one session holds for reading at a time", 65536, _whole, low=64, high=1 << 20
    )
    lease_timeout_s: float = _field(
        "time to live of a gRPC writer's lease without a sign of life",
        30.0,
        _seconds,
        unit="seconds",
        low=0.1,
        high=3600.0,
    )
    max_leases: int = _field("most gRPC leases at a time", 1024, _whole, low=1, high=65536)
    max_calls: int = _field(
        "most gRPC calls in progress; more are refused with RESOURCE_EXHAUSTED", 256, _whole, low=8, high=4096
    )
    max_subscribers: int = _field("most subscribers of Events", 16, _whole, low=1, high=256)
    event_queue: int = _field(
        "most events waiting for one subscriber; what does not fit is dropped and counted",
        256,
        _whole,
        low=8,
        high=65536,
    )
    io_threads: int = _field(
        "threads for native calls that may take long: bytes through gRPC, scrub, flush",
        4,
        _whole,
        low=2,
        high=32,
    )
    max_message_bytes: int = _field(
        "largest gRPC message, either way",
        4 << 20,
        parse_size,
        unit="bytes",
        low=2 << 20,
        high=64 << 20,
        show=format_size,
    )
    metrics_port: int = _field(
        "TCP port on 127.0.0.1 for Prometheus metrics; 0: none",
        0,
        _whole,
        low=0,
        high=65535,
    )
    metrics_token_file: str = _field(
        "file with the token that /metrics wants as `Authorization: Bearer ...`: any local user reaches the "
        "port, and its labels name namespaces. Needed where a namespace is open to other users",
        "",
        _path,
    )
    node: str = _field("this daemon's name among its peers", "", _node)
    listen: Endpoint | None = _field(  # noqa: RUF009
        "HOST:PORT where peers read blocks of shared namespaces; port 0: any. Default: nowhere",
        None, _endpoint, show=lambda at: str(at or ""),
    )  # fmt: skip
    peer: tuple[Peer, ...] = _field(
        "NAME=HOST:PORT of another host's daemon, whose blocks are fetched when they are asked for here; may "
        "be given several times, on one line joined by commas",
        (), _peers, show=lambda found: ",".join(map(str, found)),
    )  # fmt: skip
    trusted_network: Any = _field(  # noqa: RUF009
        "network (CIDR) of the peers that may speak without encryption off loopback; whoever can send there "
        "can read and change what is fetched",
        None, _network, show=lambda network: str(network or ""),
    )  # fmt: skip
    cluster: str = _field(
        "etcd://HOST:PORT[,HOST:PORT…][/NAME] of a cluster to join: a process beside the daemon keeps blocks "
        "of shared namespaces in Mooncake, and finds what others keep. Its hosts are each other's peers too "
        "where TLS or trusted_network lets them. Without node and listen the daemon is named as its host is, "
        "and listens on its address towards etcd, if it may. Mooncake has no password and no encryption, and "
        "listens on every address: only where trusted_network is all there is",
        "", _cluster,
    )  # fmt: skip
    cluster_memory: int = _field(
        "memory that this host gives to the cluster's pool, beside its own. 0: no pool, and no Mooncake: the "
        "cluster's hosts are each other's peers, that is all",
        256 << 20, parse_size, unit="bytes", low=0, high=16 << 40, show=format_size,
    )  # fmt: skip
    cluster_replicas: int = _field("hosts that keep each block of the pool", 2, _whole, low=1, high=8)
    tls_cert: str = _field(
        "file (PEM) with this daemon's certificate, in which a DNS name is `node`, and what leads to the "
        "authority: peers speak TLS 1.3, both ends with a certificate. Read again by `kvstored reload`",
        "", _path,
    )  # fmt: skip
    tls_key: str = _field("file (PEM) with the certificate's key; nobody else may read it", "", _path)
    tls_ca: str = _field("file (PEM) with the authority whose certificates peers have", "", _path)
    log_level: str = _field("least important level that is logged", "info", _text, choices=LEVELS)
    drain_timeout_s: float = _field(
        "how long calls in progress may go on after SIGTERM before they are cancelled",
        0.1,
        _seconds,
        unit="seconds",
        low=0.0,
        high=300.0,
    )

    def __post_init__(self) -> None:
        for about in dataclasses.fields(self):
            _check(about, getattr(self, about.name))
        if len(os.fsencode(self.dir)) > MAX_DIR_BYTES:
            raise ConfigError(
                f"dir: {self.dir!r} has {len(os.fsencode(self.dir))} bytes, the limit is {MAX_DIR_BYTES} "
                "(a Unix socket's address is short)"
            )
        if self.metrics_port and self.open_to_others and not self.metrics_token_file:
            raise ConfigError(
                "metrics_port: any local user reaches it, and namespaces are open to other users, who must "
                "not see each other's: give metrics_token_file, or 0"
            )
        if self.cluster and not self.listen:  # a host joins by it alone: only its fabric connects
            object.__setattr__(self, "listen", Endpoint("127.0.0.1", 0))
            object.__setattr__(self, "node", self.node or _this_host())
        if why := _why_no_peers(self.node, self.listen, self.peer, self.trusted_network, self.tls):
            raise ConfigError(why)
        if self.cluster and (why := _why_no_pool(self.cluster_memory, self.tls)):
            raise ConfigError(why)
        self._check_parts()

    def _check_parts(self) -> None:
        if self.disk_shared and not self.node:
            raise ConfigError("node: disk_shared wants this daemon's own name among its peers")
        if bool(self.disks) != bool(self.disk_quota):
            raise ConfigError(
                f"disk_quota: {format_size(self.disk_quota)} with {len(self.disks)} directories in disk and "
                "disk_shared: the disk tier wants both, or neither"
            )
        _directories(self.disks)  # none in another
        for part_of, whole in (("memory", self.memory), ("disk_quota", self.disk_quota)):
            parts = self._parts(part_of, whole)
            if (total := sum(parts.values())) > whole:
                raise ConfigError(
                    f"namespaces: their {part_of} adds up to {total} bytes, {total / (whole or 1):g} of "
                    f"{part_of}: the limit is 1, that is {whole} bytes"
                )
            for name, part in parts.items():
                if whole and part < MIN_PART_BYTES:
                    raise ConfigError(
                        f"namespaces: {name!r} would get {part} bytes of {part_of}, "
                        f"the least is {format_size(MIN_PART_BYTES)}: give it a larger part"
                    )
        for namespace in self.namespaces:
            if self.blocks_of(namespace.name) < 1:
                raise ConfigError(
                    f"namespaces: {namespace.name!r} would get no block of max_blocks = {self.all_blocks}: "
                    "give it a larger part of the memory"
                )

    def _parts(self, part_of: str, whole: int) -> dict[str, int]:
        """Bytes per namespace. Who names no part gets what the others leave, divided as the memory is."""
        parts: dict[str, int] = {}
        for namespace in self.namespaces:
            said = getattr(namespace, part_of)
            if said is not None:
                parts[namespace.name] = int(whole * said) if isinstance(said, float) else said
        open_ended = [namespace.name for namespace in self.namespaces if namespace.name not in parts]
        rest = max(0, whole - sum(parts.values()))
        weights = (
            {name: self.capacity_bytes(name) for name in open_ended}
            if len(open_ended) > 1
            else dict.fromkeys(open_ended, 1)
        )
        for name in open_ended:
            parts[name] = rest * weights[name] // max(1, sum(weights.values()))
        return {namespace.name: parts[namespace.name] for namespace in self.namespaces}

    @property
    def all_blocks(self) -> int:
        """max_blocks, or its default from the memory."""
        return self.max_blocks or min(1 << 20, max(1024, self.memory // BLOCK_BYTES_GUESS))

    def namespace(self, name: str) -> Namespace:
        return next(namespace for namespace in self.namespaces if namespace.name == name)

    def capacity_bytes(self, namespace: str) -> int:
        return self._parts("memory", self.memory)[namespace] >> 21 << 21

    def blocks_of(self, namespace: str) -> int:
        return self.all_blocks * self._parts("memory", self.memory)[namespace] // self.memory

    def disk_bytes(self, namespace: str) -> int:
        """The namespace's part of disk_quota; 0 without a disk tier."""
        return self._parts("disk_quota", self.disk_quota)[namespace]

    def disk_files_of(self, namespace: str) -> int:
        return max(1, self.disk_files * self.disk_bytes(namespace) // max(1, self.disk_quota))

    @property
    def own_shared(self) -> str:
        """This daemon's part of disk_shared, "" without."""
        return os.path.join(self.disk_shared, self.node) if self.disk_shared else ""

    @property
    def disks(self) -> tuple[str, ...]:
        """All directories of the disk tier."""
        return (*self.disk, self.own_shared) if self.disk_shared else self.disk

    def disks_of(self, namespace: str) -> tuple[str, ...]:
        """Those that its blocks may lie in: what is not shared lies where no other host reads."""
        return self.disks if namespace in self.shared else self.disk

    @property
    def shared(self) -> tuple[str, ...]:
        """The namespaces whose blocks peers may read."""
        return tuple(namespace.name for namespace in self.namespaces if namespace.share != "none")

    @property
    def tls(self) -> tuple[str, str, str]:
        """The paths of certificate, key and authority; empty without TLS."""
        return self.tls_cert, self.tls_key, self.tls_ca

    @property
    def etcd(self) -> str:
        """HOST:PORT of the cluster's etcd, several joined by commas."""
        return self.cluster.removeprefix("etcd://").partition("/")[0]

    @property
    def open_to_others(self) -> bool:
        """Whether any namespace may be used by another user than the daemon's own and root."""
        return any(namespace.open_to_others for namespace in self.namespaces)

    def in_dir(self, name: str) -> str:
        return os.path.join(self.dir, name)


def _check(about: dataclasses.Field[Any], value: Any) -> None:
    meta = about.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{about.name}: {value!r} is none of {', '.join(meta['choices'])}")
    for limit, beyond, word in (
        (meta["low"], lambda a, b: a < b, "least"),
        (meta["high"], lambda a, b: a > b, "most"),
    ):
        if limit is not None and beyond(value, limit):
            unit = f" {meta['unit']}" if meta["unit"] else ""
            shown = f" ({meta['show'](limit)})" if meta["show"] is format_size else ""
            raise ConfigError(
                f"{about.name}: {value}{unit} is out of bounds, the {word} is {limit}{unit}{shown}"
            )
