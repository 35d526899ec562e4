"""Every error the library raises, with whose fault each is.

Owns the exception tree; the native module raises these classes by name. Never holds logic beyond the texts
of the objects. Invariant: whatever the library raises on purpose is a KVClientError, and a miss is none of
them: a block that is not there is a value (None, "no_space", "unavailable", a lower count), not an exception.

    KVClientError
    ├── Unavailable          (also ConnectionError)  nobody's: the daemon is down, starting or unreachable.
    │   │                                            Try again later, or go on without the store.
    │   └── Detached                                 nobody's: this client's session is over (restart, fork).
    │                                                KVClient attaches anew and tries again; users see it only
    │                                                if that fails too, and then as Unavailable.
    ├── InvalidArgument      (also ValueError)       the caller's: a value is malformed or out of its bounds.
    │   └── LayoutLost                               nobody's: no block had the layout any more, and its place
    │                                                went to another. KVClient registers its own again; users
    │                                                see it only for an id that another client was told.
    ├── NotPermitted         (also PermissionError)  the caller's or the operator's: this user may not open
    │                                                the daemon's directory, its socket or this namespace,
    │                                                or may only read it.
    ├── PinsExhausted                                the caller's: it holds max_pins views; release some.
    ├── PagesExhausted                               the caller's: its calls need more memory at once than
    │                                                attach(paged_tokens=) allows.
    ├── DeadlineExceeded     (also TimeoutError)     nobody's: the wait reached the deadline it was given.
    ├── BlockLost                                    another writer's: it died or aborted while its block was
    │                                                being followed; or this writer's lease ended under it.
    ├── NoSpace                                      the operator's or the readers': no run of that length is
    │                                                free of pins, or the pool is too small for it.
    ├── Closed                                       the caller's: the client or the handle was closed before.
    └── IncompatibleVersion                          the operator's: library and daemon speak different
                                                     versions; install matching ones.

An AssertionError out of the library is a bug in it.
"""

__all__ = [
    "BlockLost",
    "Closed",
    "DeadlineExceeded",
    "Detached",
    "IncompatibleVersion",
    "InvalidArgument",
    "KVClientError",
    "LayoutLost",
    "NoSpace",
    "NotPermitted",
    "PagesExhausted",
    "PinsExhausted",
    "Unavailable",
]


class KVClientError(Exception):
    """The root: catch this to catch everything the library raises on purpose."""


class Unavailable(KVClientError, ConnectionError):
    """The daemon cannot be reached now. The call did not happen, or its outcome is unknown."""


class Detached(Unavailable):
    """The session ended (daemon restarted, process forked). Internal: KVClient attaches anew."""


class InvalidArgument(KVClientError, ValueError):
    """An argument is malformed or outside its bounds; the text names the value and the limit."""


class LayoutLost(InvalidArgument):
    """The id's layout had no block left and its place went to another: register it again."""


class NotPermitted(KVClientError, PermissionError):
    """The daemon refuses this user, or refuses a write to a session that may only read."""


class PinsExhausted(KVClientError):
    """All pins of the session are in use. Raised for the item that found none free, never told as a miss."""


class PagesExhausted(KVClientError):
    """The pool of pages of an attachment is in use. The call ends; its pages are free again."""


class DeadlineExceeded(KVClientError, TimeoutError):
    """A wait ended at its deadline; what was waited for may still come."""


class BlockLost(KVClientError):
    """The block this handle stands for will never be complete: its writer died or aborted it."""


class NoSpace(KVClientError):
    """No unpinned run of memory is long enough; the text names what was asked and what the pool has."""


class Closed(KVClientError):
    """The client, writer or set of blocks was closed or released before this call."""


class IncompatibleVersion(KVClientError):
    """The library and the daemon (or its memory) have different protocol or format versions."""
