"""Who may use which namespace on this host: names become ids, salts become bytes, sockets get their modes.

Owns what is asked of the host's user and group tables and the salts' files. Never decides about a connection:
that is the session server's (native/core/session/session_access.cc) and, on gRPC, its tokens'. Invariant: a
salt or a part of one is never in an error, a log line or a message to anybody but the namespace's own
clients.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import secrets
from dataclasses import dataclass, replace

from kvstored import log
from kvstored._core import Tenant
from kvstored.config.config import Config
from kvstored.config.namespaces import MAX_SALT_BYTES, MIN_SALT_BYTES, UNMAPPED_ID, Namespace
from kvstored.config.sources import no_pipe
from kvstored.errors import StartupError
from kvstored.process import runtime_dir

SALT_DOMAIN = b"kvs1"
GENERATED_SALT_BYTES = 32


@dataclass(frozen=True)
class Openness:
    """How far the runtime directory and the sockets for other users open."""

    directory_mode: int
    socket_mode: int
    group: int = -1  # that owns them; -1: the daemon's own

    def apply(self, path: str, mode: int) -> None:
        """The group first: a wide mode must never meet the wrong one. Where a sandbox forbids to give files
        away (the unit's filter of system calls), what the group may all may, and credentials decide."""
        try:
            if self.group >= 0:
                try:
                    os.chown(path, -1, self.group)
                except PermissionError:
                    mode |= (mode & 0o070) >> 3
            os.chmod(path, mode)
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}") from error


def tenants(config: Config) -> list[Tenant]:
    """One per namespace, in their order. Raises StartupError for a name this host does not know."""
    _check_own_user(config)
    return [_tenant(namespace, _salt(config, namespace)) for namespace in config.namespaces]


def relisted(known: list[Tenant], namespaces: tuple[Namespace, ...]) -> list[Tenant]:
    """The same with the lists of these, which are as many. Raises StartupError."""
    return [_tenant(new, old.salt) for old, new in zip(known, namespaces, strict=True)]


def with_lists(before: tuple[Namespace, ...], after: tuple[Namespace, ...]) -> tuple[Namespace, ...]:
    """What a running daemon can take over of `after`: who may read and write what is there already. Nothing
    where it would have to open its sockets to others: those are of the start. Raises StartupError where this
    host has no such user or group, also in a list that waits for the restart, which would fail."""
    for namespace in after:
        _tenant(namespace, b"")
    lists = {namespace.name: namespace for namespace in after}
    found = tuple(
        replace(namespace, readers=lists[namespace.name].readers, writers=lists[namespace.name].writers)
        if namespace.name in lists
        else namespace
        for namespace in before
    )
    was_open, is_open = (any(namespace.open_to_others for namespace in some) for some in (before, found))
    return before if is_open and not was_open else found


def openness(config: Config, known: list[Tenant]) -> Openness:
    """Nobody else: closed. One group and nobody beside it: that group's, if the daemon may give its files
    to it. Otherwise everybody may knock, and credentials decide; nobody but the daemon may list or write."""
    if not config.open_to_others:
        return Openness(0o700, 0o600)
    users = {uid for tenant in known for uid in (*tenant.reader_users, *tenant.writer_users)}
    groups = {gid for tenant in known for gid in (*tenant.reader_groups, *tenant.writer_groups)}
    if len(groups) == 1 and not users:
        (group,) = groups
        if os.geteuid() == 0 or group in {os.getegid(), *os.getgroups()}:
            return Openness(0o710, 0o660, group)
    return Openness(0o711, 0o666)


def open_directory(path: str, opening: Openness, made: bool) -> None:
    """The runtime directory: as open as `opening` says if it was made now, otherwise as its maker left it.
    Raises StartupError."""
    if made:
        opening.apply(path, opening.directory_mode)
        return
    try:
        found = os.stat(path)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    if opening.socket_mode == 0o600 or found.st_mode & 0o001:
        return
    if opening.group >= 0 and found.st_gid == opening.group and found.st_mode & 0o010:
        return
    why = "other users are configured and cannot enter it"
    if found.st_mode & 0o010:
        why = f"users are configured beside group {found.st_gid}, which alone may enter it"
    log.warning("runtime_directory_closed", path=path, why=why)


def metrics_token(config: Config) -> str:
    """What /metrics wants to be shown; "" if nothing."""
    if not config.metrics_token_file:
        return ""
    secret = _read_secret(config.metrics_token_file, "metrics_token_file")
    if not secret.isascii() or not secret.decode().isprintable():
        raise StartupError("metrics_token_file: printable ASCII is wanted, it stands in a header")
    return secret.decode()


def _check_own_user(config: Config) -> None:
    if os.geteuid() == UNMAPPED_ID and config.open_to_others:
        raise StartupError(
            f"namespaces: the daemon runs as user {UNMAPPED_ID}, whom every unmapped user looks like: "
            "give it a user of its own"
        )


def _tenant(namespace: Namespace, salt: bytes) -> Tenant:
    (reader_users, reader_groups), (writer_users, writer_groups) = (
        _ids(namespace, field) for field in ("readers", "writers")
    )
    return Tenant(
        reader_users=reader_users, reader_groups=reader_groups, writer_users=writer_users,
        writer_groups=writer_groups, salt=salt,
    )  # fmt: skip


def _ids(namespace: Namespace, field: str) -> tuple[list[int], list[int]]:
    users: list[int] = []
    groups: list[int] = []
    for principal in getattr(namespace, field):
        name = principal.removeprefix("@")
        try:
            if name.isdigit():
                number = int(name)
            elif principal.startswith("@"):
                number = grp.getgrnam(name).gr_gid
            else:
                number = pwd.getpwnam(name).pw_uid
        except KeyError:
            what = "group" if principal.startswith("@") else "user"
            raise StartupError(
                f"namespaces: {field} of {namespace.name!r}: this host has no {what} {name!r}"
            ) from None
        if number == UNMAPPED_ID:
            raise StartupError(
                f"namespaces: {field} of {namespace.name!r}: {name!r} is {UNMAPPED_ID}, whom every unmapped "
                "user looks like"
            )
        (groups if principal.startswith("@") else users).append(number)
    return users, groups


def _salt(config: Config, namespace: Namespace) -> bytes:
    """32 bytes, or none. What is handed out is a digest: of any length before, and not the secret itself."""
    kind, _, rest = namespace.salt.partition(":")
    if kind == "":
        return b""
    if kind == "text":
        secret = rest.encode()
    elif kind == "file":
        secret = _read_secret(rest, f"namespaces: the salt of {namespace.name!r}")
    else:
        secret = _generated_salt(config, namespace.name)
    return hashlib.sha256(SALT_DOMAIN + secret).digest()


def _read_secret(path: str, what: str) -> bytes:
    try:
        with open(path, "rb", opener=no_pipe) as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = (file.read(MAX_SALT_BYTES + 2) or b"").strip()
    except OSError as error:
        raise StartupError(f"{what}: {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{what}: {path} {error}") from None
    if mode & 0o004:
        raise StartupError(f"{what}: {path}: everybody may read it; chmod o-r")
    if not MIN_SALT_BYTES <= len(secret) <= MAX_SALT_BYTES:
        raise StartupError(
            f"{what}: {path} has {len(secret)} bytes, the limits are {MIN_SALT_BYTES} and {MAX_SALT_BYTES}"
        )
    return secret


def _generated_salt(config: Config, name: str) -> bytes:
    """The one made at the first start with this state directory: another would hide what lies on disk."""
    directory = os.path.realpath(config.state_dir or config.dir)
    runtime_dir.prepare(directory, "state directory")
    path = os.path.join(directory, f"{name}.salt")
    with contextlib.suppress(FileNotFoundError):
        if not runtime_dir.is_own(os.lstat(path)):
            found = runtime_dir.described(os.lstat(path))
            raise StartupError(f"namespaces: the salt of {name!r}: {path} is foreign: {found}")
        return _read_secret(path, f"namespaces: the salt of {name!r}")
    runtime_dir.write_whole(path, secrets.token_hex(GENERATED_SALT_BYTES).encode())
    log.info("salt_generated", namespace=name, path=path)
    return _read_secret(path, f"namespaces: the salt of {name!r}")
