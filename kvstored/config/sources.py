"""Where a configuration comes from: file (TOML) < environment (KVSTORED_<FIELD>) < flag (--<field>).

Owns that order and, per field, the source of its value. Knows no field's meaning. Invariant: what load()
returns is within all bounds; everything else is a ConfigError that names field, value and source.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstored.config.config import Config
from kvstored.config.fields import path as _path
from kvstored.errors import ConfigError

ENVIRONMENT_PREFIX = "KVSTORED_"
NO_FIELDS = {"KVSTORED_CONFIG", "KVSTORED_FAULTS"}  # ours all the same: the file, and tiers.FAULTS
SYSTEM_DIR = "/run/kvstored"
MAX_FILE_BYTES = 1 << 20
MAX_SHOWN = 80  # characters of a value
ALIKE = 0.8  # of difflib: MEMROY is MEMORY; METRICS_PORT and Kubernetes' SERVICE_PORT, 0.75, are two names
NEAR = 0.6  # a field that is refused anyway: what it may have been


@dataclass(frozen=True)
class Sourced:
    """A configuration and, per field, where its value came from: default, file, environment or flag."""

    config: Config
    sources: dict[str, str]
    flags: Mapping[str, Any] = field(default_factory=dict)  # as given, and the file's path: to load again
    file: str = ""
    unread: tuple[str, ...] = ()  # variables of the environment that begin as ours and name no field

    def entries(self) -> list[dict[str, str]]:
        """For print-config and Admin.Config: name, value, source, unit, doc."""
        found = []
        for about in dataclasses.fields(Config):
            value = getattr(self.config, about.name)
            rows = [(about.name, about.metadata["show"](value))]
            if about.name == "namespaces":
                rows = [(f"namespaces.{namespace.name}", namespace.shown()) for namespace in value]
            for name, shown in rows:
                found.append(
                    {
                        "name": name,
                        "value": shown,
                        "source": self.sources[about.name],
                        "unit": about.metadata["unit"],
                        "doc": about.metadata["doc"],
                    }
                )
        return found


def default_dir(environ: Mapping[str, str]) -> str:
    """The runtime directory of a daemon that nobody names one."""
    if named := _named_path(environ, "KVSTORED_DIR"):
        return named
    # As a system service the directory exists already; root may make it.
    if os.access(SYSTEM_DIR if os.path.isdir(SYSTEM_DIR) else "/run", os.W_OK | os.X_OK):
        return SYSTEM_DIR
    if user := _named_path(environ, "XDG_RUNTIME_DIR"):
        return os.path.join(user, "kvstored")
    raise ConfigError(
        "dir: no runtime directory: /run/kvstored is not for this user, and XDG_RUNTIME_DIR, which a login "
        "session has, is not set: give --dir, for example --dir ~/.kvstored, or set KVSTORED_DIR"
    )


def running_dir(environ: Mapping[str, str]) -> str:
    """The runtime directory that a command asks when nobody names one: where clients would find a daemon,
    also one that this user may not ask, which is said then; else that of the daemon it would start."""
    if not environ.get("KVSTORED_DIR"):
        user = _named_path(environ, "XDG_RUNTIME_DIR")
        for directory in (SYSTEM_DIR, *((os.path.join(user, "kvstored"),) if user else ())):
            if os.path.exists(os.path.join(directory, "kvstored.sock")):
                return directory
    return default_dir(environ)


def _named_path(environ: Mapping[str, str], name: str) -> str:
    try:
        return _path(environ.get(name, ""))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{name}: {_shown(environ[name])}: {error}") from None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python shows no number of more than 4300 digits
        text = "a number"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def no_pipe(path: str, flags: int) -> int:
    """An opener for open(). Raises ValueError for a pipe: a daemon hangs in it, at the latest at a reload."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is a pipe: a file is wanted, which can be read again")
    return descriptor


def _read_whole(path: str) -> str:
    with open(path, "rb", opener=no_pipe) as file:
        text = file.read(MAX_FILE_BYTES + 1) or b""
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"the limit is {MAX_FILE_BYTES} bytes")
    return text.decode()


def _read_file(path: str) -> dict[str, Any]:
    import tomllib  # most daemons start without a file

    try:
        table = tomllib.loads(_read_whole(path))
    except OSError as error:
        raise ConfigError(f"configuration file {path!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, too many digits or brackets
        raise ConfigError(f"configuration file {path!r}: {error}") from error
    known = {about.name for about in dataclasses.fields(Config)}
    for name in table:
        if name not in known:
            raise ConfigError(f"configuration file {path!r}: unknown field {name!r}{near(name, known)}")
    return table


def near(name: str, known: Iterable[str]) -> str:
    """What is said behind an unknown name: the nearest known one, or where they are listed."""
    import difflib  # only where something is wrong

    found = difflib.get_close_matches(name.lower().replace("-", "_"), sorted(known), 1, NEAR)
    return f"; the nearest is {found[0]!r}" if found else "; kvstored serve --help lists them"


def _unread(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that begin as ours and name nothing. One that is nearly a field's name is refused, as an
    unknown field of the file is; any other may be somebody else's (Kubernetes sets KVSTORED_SERVICE_HOST)."""
    known = {ENVIRONMENT_PREFIX + about.name.upper() for about in dataclasses.fields(Config)} | NO_FIELDS
    ours = (name for name, value in environ.items() if value and name.startswith(ENVIRONMENT_PREFIX))
    unread = tuple(sorted(name for name in ours if name not in known))
    if unread:
        import difflib  # most daemons start without one

        bare = [name.removeprefix(ENVIRONMENT_PREFIX) for name in sorted(known)]
        for name in unread:
            for near in difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), bare, 1, ALIKE):
                raise ConfigError(f"{name} (environment): unknown; the nearest is {ENVIRONMENT_PREFIX}{near}")
    return unread


def _check_secrecy(path: str) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & stat.S_IROTH:
        raise ConfigError(
            f"configuration file {path!r} holds a salt and has mode {mode:04o}: everybody may read it; "
            "chmod o-r, or write file:<path> or generated"
        )


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
        for source, values_of in layers:
            if about.name not in values_of:
                continue
            try:
                values[about.name] = about.metadata["parse"](values_of[about.name])
            except (ValueError, TypeError, OverflowError, OSError) as error:
                # A namespace's table may hold a secret: its errors name what is wrong in it themselves.
                value = "" if about.name == "namespaces" else f"{_shown(values_of[about.name])} "
                raise ConfigError(f"{about.name}: {value}({source}): {error}") from None
            sources[about.name] = source
    if not values.get("dir"):
        values["dir"] = default_dir(environ)
    if not values.get("state_dir"):
        values["state_dir"] = environ.get("STATE_DIRECTORY", "").split(":")[0] or values["dir"]
    if file and any(namespace.salt.startswith("text:") for namespace in values.get("namespaces", ())):
        _check_secrecy(file)
    return Sourced(Config(**values), sources, dict(flags), file or "", _unread(environ))
