"""Every error the daemon raises on purpose, and the gRPC status each becomes.

KVStoredError
├── ConfigError            the operator's: a field of the configuration; exit code 2
├── StartupError           the machine's: lock held, directory unsafe, file system too small; exit code 6
└── StoreError             an operation failed; the caller gets the status below
    ├── InvalidArgument    the caller's mistake: names the value and the limit
    ├── Unauthenticated    no living session has the token that the call shows
    ├── NotPermitted       a reader asked to write
    ├── NotFound           no such namespace, layout, lease or block
    │   └── LeaseEnded     the lease reached its deadline or all its blocks have ended
    ├── NoSpace            a bound of the configuration, or no free run of memory
    ├── FailedPrecondition the call does not fit the state
    │   └── IncompatibleVersion  segments of another format
    ├── IntegrityError     a checksum or an invariant does not hold
    ├── BlockLost          the block's writer gave it up or died
    ├── DeadlineExceeded   a wait reached its bound
    ├── Fenced             a client harmed this namespace's memory; the others are served
    └── Stopping           the daemon is about to end and takes no call in

kvstored._core raises the StoreError classes by name. Anything else that reaches a caller is a bug (INTERNAL).
"""

from __future__ import annotations

import enum

MAX_SHOWN = 64  # characters of a caller's text


class Exit(enum.IntEnum):
    """The command line's exit codes: a promise to scripts."""

    DONE = 0
    NO = 1  # nothing to remove, no such block, corruption, a push cut short, a drain's time over
    USAGE = 2  # wrong arguments or configuration
    UNREACHABLE = 3  # no daemon answers in the runtime directory
    REFUSED = 4  # the daemon refused or failed the call
    CANNOT_START = 6  # another runs, directory unsafe, too little memory


class KVStoredError(Exception):
    """Base of all."""


class ConfigError(KVStoredError):
    """A value of the configuration is wrong."""


class StartupError(KVStoredError):
    """The daemon cannot start here."""


class StoreError(KVStoredError):
    """An operation failed."""


class InvalidArgument(StoreError):
    """The caller's argument is outside of a limit."""


class Unauthenticated(StoreError):
    """Nobody is known by what the call shows."""


class NotPermitted(StoreError):
    """The caller may read only."""


class NotFound(StoreError):
    """What the caller names does not exist."""


class LeaseEnded(NotFound):
    """The lease is over; its unsealed blocks were aborted."""


class NoSpace(StoreError):
    """A bound was reached."""


class FailedPrecondition(StoreError):
    """Not possible in this state."""


class IncompatibleVersion(FailedPrecondition):
    """The segments were made by another version or with another geometry."""


class IntegrityError(StoreError):
    """A checksum or an invariant does not hold."""


class BlockLost(StoreError):
    """The block's writer gave it up or died."""


class DeadlineExceeded(StoreError):
    """A wait reached its bound."""


class Fenced(StoreError):
    """The namespace's memory was harmed by a client; it is refused until the daemon is started again."""


class Stopping(StoreError):
    """The daemon takes no call in any more: try the next one."""


# The one table from error to status. First match in the class's own order of bases (mro) wins.
STATUS_NAMES: dict[type[BaseException], str] = {
    InvalidArgument: "INVALID_ARGUMENT",
    Unauthenticated: "UNAUTHENTICATED",
    NotPermitted: "PERMISSION_DENIED",
    NotFound: "NOT_FOUND",
    NoSpace: "RESOURCE_EXHAUSTED",
    FailedPrecondition: "FAILED_PRECONDITION",
    IntegrityError: "DATA_LOSS",
    BlockLost: "ABORTED",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Fenced: "UNAVAILABLE",
    Stopping: "UNAVAILABLE",
}


def status_name(error: BaseException) -> str:
    """The gRPC status of an error, by name; INTERNAL for what is not in the tree."""
    for cls in type(error).__mro__:
        if cls in STATUS_NAMES:
            return STATUS_NAMES[cls]
    return "INTERNAL"


def unknown_namespace(name: str) -> NotFound:
    """Shows so much of the name that the answer can be sent: it goes in a header, which has a limit."""
    return NotFound(f"no namespace {name[:MAX_SHOWN]!r}")
