"""The daemon's configuration: one frozen object, every field with a meaning, a unit, a default and bounds.

Owns the field table and the order file (TOML) < environment (KVSTORED_<FIELD>) < flag (--<field>). Never
opens a socket or a segment. Invariant: a Config that exists is within all bounds; everything else is a
ConfigError that names field, value, limit and source.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstored.errors import ConfigError
from kvstored.log import LEVELS
from kvstored.units import format_size, parse_size

ENVIRONMENT_PREFIX = "KVSTORED_"
MAX_NAMESPACES = 16
# A Unix socket's address holds 107 bytes; the longest name in the directory is "kvstored.sock".
MAX_DIR_BYTES = 107 - len("/kvstored.sock")
BLOCK_BYTES_GUESS = 64 << 10  # for the default of max_blocks: one record per so much memory
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


def _field(
    doc: str,
    default: Any,
    parse: Callable[[Any], Any],
    *,
    unit: str = "",
    low: Any = None,
    high: Any = None,
    choices: tuple[str, ...] = (),
    show: Callable[[Any], str] = str,
) -> Any:
    about = {
        "doc": doc,
        "parse": parse,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": choices,
        "show": show,
    }
    return field(default=default, metadata=about)


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("a text is wanted")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("a whole number is wanted")
    return int(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number of seconds is wanted")
    number = float(value)
    if number != number:
        raise ValueError("a number of seconds is wanted")
    return number


def _path(value: Any) -> str:
    return os.path.abspath(os.path.expanduser(_text(value))) if _text(value) else ""


def _shares(value: Any) -> tuple[tuple[str, float], ...]:
    """A TOML table, or `name=share,name=share`; `name` alone, once, takes the rest."""
    if isinstance(value, str):
        value = dict(
            (part.split("=", 1) if "=" in part else (part, 0)) for part in value.replace(" ", "").split(",")
        )
    if not isinstance(value, Mapping):
        raise ValueError("name = share pairs are wanted, for example default=0.75,other=0.25")
    shares = {name: float(share) for name, share in value.items()}
    if not 1 <= len(shares) <= MAX_NAMESPACES:
        raise ValueError(f"{len(shares)} namespaces: the limit is {MAX_NAMESPACES}, and one at least")
    for name, share in shares.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no namespace: lower case letters, digits and _.- only, at most 63")
        if not 0 <= share <= 1:
            raise ValueError(f"the share of {name!r} is {share}: the limits are 0 and 1")
    open_ended = [name for name, share in shares.items() if share == 0]
    total = sum(shares.values())
    if total > 1 + 1e-9 or (open_ended and total >= 1) or len(open_ended) > 1:
        raise ValueError(
            f"the shares add up to {total:g}: the limit is 1, and one name at most may take the rest"
        )
    if open_ended:
        shares[open_ended[0]] = 1 - total
    return tuple(shares.items())


def _uids(value: Any) -> tuple[int, ...]:
    items = [item for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ValueError("a list of user ids is wanted")
    uids = tuple(_whole(item) for item in items)
    # 65534 is what every user becomes that has no name here: it matches nobody in particular.
    if len(uids) > 64 or any(not 0 <= uid < 2**32 - 1 or uid == 65534 for uid in uids):
        raise ValueError(f"{uids}: at most 64 user ids, none of them 65534")
    return uids


def _show_shares(shares: tuple[tuple[str, float], ...]) -> str:
    return ",".join(f"{name}={share:g}" for name, share in shares)


def _show_uids(uids: tuple[int, ...]) -> str:
    return ",".join(map(str, uids))


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
    pool: str = _field("what the pool is made of: named POSIX shared memory", "shm", _text, choices=("shm",))
    pool_dir: str = _field(
        "a directory on a tmpfs or hugetlbfs that holds the pool's files instead of /dev/shm", "", _path
    )
    namespaces: tuple[tuple[str, float], ...] = _field(
        "namespace = share of memory and blocks; a name without a share takes the rest",
        (("default", 1.0),),
        _shares,
        show=_show_shares,
    )
    allow_uids: tuple[int, ...] = _field(
        "users besides the daemon's own and root that may attach to its socket", (), _uids, show=_show_uids
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
        "TCP port on 127.0.0.1 for Prometheus metrics; 0: off, and no TCP socket at all",
        0,
        _whole,
        low=0,
        high=65535,
    )
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
        for name, _ in self.namespaces:
            if self.capacity_bytes(name) < 2 << 20 or self.blocks_of(name) < 1:
                raise ConfigError(
                    f"namespaces: {name!r} would get {self.capacity_bytes(name)} bytes and "
                    f"{self.blocks_of(name)} blocks, the least is 2MiB and 1: give it a larger share"
                )

    @property
    def all_blocks(self) -> int:
        """max_blocks, or its default from the memory."""
        return self.max_blocks or min(1 << 20, max(1024, self.memory // BLOCK_BYTES_GUESS))

    def capacity_bytes(self, namespace: str) -> int:
        return int(self.memory * dict(self.namespaces)[namespace]) >> 21 << 21

    def blocks_of(self, namespace: str) -> int:
        return int(self.all_blocks * dict(self.namespaces)[namespace])

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


@dataclass(frozen=True)
class Sourced:
    """A configuration and, per field, where its value came from: default, file, environment or flag."""

    config: Config
    sources: dict[str, str]
    flags: Mapping[str, Any] = field(default_factory=dict)  # as given, and the file's path: to load again
    file: str = ""

    def entries(self) -> list[dict[str, str]]:
        """For print-config and Admin.Config: name, value, source, unit, doc."""
        return [
            {
                "name": about.name,
                "value": about.metadata["show"](getattr(self.config, about.name)),
                "source": self.sources[about.name],
                "unit": about.metadata["unit"],
                "doc": about.metadata["doc"],
            }
            for about in dataclasses.fields(Config)
        ]


def default_dir(environ: Mapping[str, str]) -> str:
    """The runtime directory when nobody names one."""
    if named := environ.get("KVSTORED_DIR"):
        return _path(named)
    # As a system service the directory exists already; root may make it.
    system = "/run/kvstored"
    if os.access(system if os.path.isdir(system) else "/run", os.W_OK | os.X_OK):
        return system
    if user := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(_path(user), "kvstored")
    raise ConfigError("dir: no runtime directory: give --dir, or set KVSTORED_DIR or XDG_RUNTIME_DIR")


def _read_file(path: str) -> dict[str, Any]:
    import tomllib  # most daemons start without a file

    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"configuration file {path!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path!r}: {error}") from error
    known = {about.name for about in dataclasses.fields(Config)}
    for name in table:
        if name not in known:
            raise ConfigError(
                f"configuration file {path!r}: unknown field {name!r}; known are {', '.join(sorted(known))}"
            )
    return table


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> Sourced:
    """Merges the sources. `flags` holds only what was given. Raises ConfigError."""
    file = file or environ.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    layers = [("file", _read_file(file) if file else {}), ("environment", {}), ("flag", dict(flags))]
    for about in dataclasses.fields(Config):
        if (text := environ.get(ENVIRONMENT_PREFIX + about.name.upper())) is not None and text != "":
            layers[1][1][about.name] = text
    values: dict[str, Any] = {}
    sources = {about.name: "default" for about in dataclasses.fields(Config)}
    for about in dataclasses.fields(Config):
        for source, given in layers:
            if about.name not in given:
                continue
            try:
                values[about.name] = about.metadata["parse"](given[about.name])
            except (ValueError, TypeError, OverflowError) as error:
                raise ConfigError(f"{about.name}: {given[about.name]!r} ({source}): {error}") from error
            sources[about.name] = source
    if not values.get("dir"):
        values["dir"] = default_dir(environ)
    return Sourced(Config(**values), sources, dict(flags), file or "")
