"""What the configuration says of a namespace: its part of memory and disk, its readers, writers and salt.

Owns the grammar, from a TOML table or from one line of text, and back. Never asks the host who a user is and
never reads a salt's file (kvstored.access.tenants does). Invariant: a Namespace that exists is well formed,
and its shown form has no secret in it.

    [namespaces.batch]                       --namespaces default=0.75,batch:writers=alice+@llm:salt=generated
    memory = 0.25          # or "8GiB"; absent: what the others leave
    disk_quota = "20GiB"   # or a share of disk_quota; absent: what the others leave, divided as the memory is
    readers = ["@analysts", 1000]
    writers = ["alice", "@llm"]
    salt = "generated"     # or "file:/etc/kvstored/batch.salt", or, in the file only, "text:…"
    share = "none"         # or "read": who proves the same salt may read its blocks; "read-write": push too
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstored.config.units import format_size, parse_size

MAX_NAMESPACES = 16
MAX_PRINCIPALS = 64
SHARES = ("none", "read", "read-write")
MAX_SALT_BYTES = 1024
MIN_SALT_BYTES = 8
# What every user and group becomes that has no name here: it stands for nobody in particular.
UNMAPPED_ID = 65534
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_PRINCIPAL = re.compile(r"@?(?:[A-Za-z_][A-Za-z0-9_.-]{0,31}|\d{1,10})")
_SHARE = re.compile(r"(?:[01]|0?\.\d+|[01]\.\d*)")


@dataclass(frozen=True)
class Namespace:
    """Parts are a share (float) of the whole, bytes (int), or None: what the others leave."""

    name: str
    memory: float | int | None = None
    disk_quota: float | int | None = None
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    salt: str = ""  # "", "generated", "file:<path>" or "text:<secret>"
    # "read": peers that know the same salt may read it, and it is filled from them when a client here asks.
    # "read-write": and when a client there pushes.
    share: str = "none"

    @property
    def open_to_others(self) -> bool:
        return bool(self.readers or self.writers)

    def __repr__(self) -> str:
        return f"Namespace({self.name!r}, {self.shown()})"

    def shown(self) -> str:
        """As an inline table of the file; the secret is left out."""
        said = {}
        for part in ("memory", "disk_quota"):
            value = getattr(self, part)
            if value is not None:
                said[part] = f"{value:g}" if isinstance(value, float) else f'"{format_size(value)}"'
        for list_name in ("readers", "writers"):
            if listed := getattr(self, list_name):
                said[list_name] = "[" + ", ".join(f'"{principal}"' for principal in listed) + "]"
        if self.salt:
            said["salt"] = '"text:***"' if self.salt.startswith("text:") else f'"{self.salt}"'
        if self.share != "none":
            said["share"] = f'"{self.share}"'
        return "{ " + ", ".join(f"{key} = {value}" for key, value in said.items()) + " }" if said else "{}"


def parse(value: Any) -> tuple[Namespace, ...]:
    """From a TOML table of tables (or of plain parts), or from text. Raises ValueError."""
    if isinstance(value, str):
        entries = _from_text(value)
    elif isinstance(value, Mapping):
        entries = {
            name: about if isinstance(about, Mapping) else {"memory": about} for name, about in value.items()
        }
    else:
        raise ValueError("a table of namespaces is wanted, or for example default=0.75,other=0.25")
    if not 1 <= len(entries) <= MAX_NAMESPACES:
        raise ValueError(f"{len(entries)} namespaces: the limit is {MAX_NAMESPACES}, and one at least")
    found = tuple(_namespace(name, about) for name, about in entries.items())
    if sum(namespace.memory is None for namespace in found) > 1:
        raise ValueError("one name at most may take the rest of the memory: give the others their part")
    return found


def _from_text(text: str) -> dict[str, dict[str, Any]]:
    """`name=memory:field=value:…,…`. No secret: others can read a command line."""
    entries: dict[str, dict[str, Any]] = {}
    for entry in text.replace(" ", "").split(","):
        first, *rest = entry.split(":")
        name, _, memory = first.partition("=")
        about: dict[str, Any] = {"memory": memory} if memory else {}
        if name in entries:
            raise ValueError(f"{name!r} stands there twice")
        while rest:
            key, equals, part = rest.pop(0).partition("=")
            if not equals:
                raise ValueError(f"{key!r} of {name!r} has no value: field=value is wanted")
            if key == "salt" and part == "file" and rest:
                part += ":" + rest.pop(0)
            elif key == "salt" and part != "generated":
                raise ValueError(
                    f"the salt of {name!r} is a secret, and others can read a command line: "
                    "write generated or file:<path> here, or text:<secret> in the configuration file"
                )
            about[key] = part.split("+") if key in ("readers", "writers") else part
        entries[name] = about
    return entries


def _namespace(name: Any, about: Mapping[str, Any]) -> Namespace:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no namespace: lower case letters, digits and _.- only, at most 63")
    known = [field.name for field in fields(Namespace) if field.name != "name"]
    for key in about:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{name!r} has no field {key!r}; {hint}")
    return Namespace(
        name,
        _part(name, "memory", about.get("memory")),
        _part(name, "disk_quota", about.get("disk_quota")),
        _principals(name, "readers", about.get("readers", ())),
        _principals(name, "writers", about.get("writers", ())),
        _salt(name, about.get("salt", "")),
        _shared(name, about),
    )


def _shared(name: str, about: Mapping[str, Any]) -> str:
    share = about.get("share", "none")
    if share not in SHARES:
        raise ValueError(f"share of {name!r} is {share!r}: one of {', '.join(SHARES)} is wanted")
    if share != "none" and about.get("salt", "") in ("", "generated"):
        raise ValueError(
            f"{name!r} is shared and has no salt that a peer could have too: give the same file:</path> "
            "(or text:<secret>) to each"
        )
    return share


def _part(name: str, field: str, value: Any) -> float | int | None:
    """A number of at most 1, as a share; everything larger is a size."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field} of {name!r} is {value!r}: a share or a size is wanted")
    share = (
        isinstance(value, float) or value in (0, 1) or (isinstance(value, str) and _SHARE.fullmatch(value))
    )
    try:
        part = float(value) if share else parse_size(value)
    except ValueError as error:
        raise ValueError(f"{field} of {name!r}: {error}") from error
    if not part > 0 or (share and part > 1):
        limits = "a share is above 0 and at most 1, a size above 0"
        raise ValueError(f"{field} of {name!r} is {value!r}: {limits}")
    return part


def _principals(name: str, field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(principal, (str, int)) and not isinstance(principal, bool) for principal in value
    ):
        raise ValueError(f"{field} of {name!r} is {value!r}: a list of users and @groups is wanted")
    listed = tuple(str(principal) for principal in value)
    if len(listed) > MAX_PRINCIPALS:
        raise ValueError(f"{field} of {name!r} has {len(listed)} entries: the limit is {MAX_PRINCIPALS}")
    for principal in listed:
        if not _PRINCIPAL.fullmatch(principal):
            raise ValueError(
                f"{principal!r} in {field} of {name!r} is neither a user nor an @group, nor a number of one"
            )
        number = principal.removeprefix("@")
        if number.isdigit() and (int(number) == UNMAPPED_ID or int(number) >= 2**32 - 1):
            raise ValueError(
                f"{principal} in {field} of {name!r}: {UNMAPPED_ID} is what every unmapped user looks like, "
                f"and {2**32 - 2} is the highest id"
            )
    return listed


def _salt(name: str, value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"the salt of {name!r} must be a text")
    kind, _, rest = value.partition(":")
    if value in ("", "generated") or (kind == "file" and rest.startswith("/")):
        return value
    if kind != "text":
        raise ValueError(f'the salt of {name!r} must be "generated", "file:</path>" or "text:<secret>"')
    if not MIN_SALT_BYTES <= len(rest.encode()) <= MAX_SALT_BYTES:
        raise ValueError(
            f"the salt of {name!r} has {len(rest.encode())} bytes, the limits are "
            f"{MIN_SALT_BYTES} and {MAX_SALT_BYTES}"
        )
    return value
