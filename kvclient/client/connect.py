"""How a program gets its client: connect(), and where the daemon is if nobody says.

Owns the checks of what callers pass, and the choice between the client that raises and the one that goes on.
Never talks to a daemon itself. Invariant: a client that was made has arguments within their bounds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvclient.client.client import KVClient
from kvclient.client.tolerant import TolerantClient
from kvclient.errors import InvalidArgument

SOCKET_NAME = "kvstored.sock"
MAX_TIMEOUT_S = 3600.0
MAX_PINS = 1 << 20
MAX_PIN_DEADLINE_S = 86_400.0


def default_directory() -> Path:
    """$KVSTORED_DIR, else the first of /run/kvstored and $XDG_RUNTIME_DIR/kvstored that has a socket."""
    if chosen := os.environ.get("KVSTORED_DIR"):
        return Path(os.path.expanduser(chosen))  # as the daemon reads it
    candidates = [Path("/run/kvstored")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(runtime) / "kvstored")
    # os.path's: the one of Path raises for a directory of another user's
    return next((path for path in candidates if os.path.exists(path / SOCKET_NAME)), candidates[0])


def connect(
    dir: str | os.PathLike[str] | None = None,
    namespace: str = "default",
    on_error: str = "raise",
    timeout_s: float = 5.0,
    *,
    read_only: bool = False,
    max_pins: int = 65_536,
    door: str = "shm",
    owner: str = "client",
    pin_deadline_s: float | None = None,
    pin_bytes: int | None = None,
) -> KVClient:
    """Attaches to the daemon of that runtime directory. Default: $KVSTORED_DIR, else the first of
    /run/kvstored and $XDG_RUNTIME_DIR/kvstored that has a socket.

    timeout_s bounds every call, and every wait that is not told another time. read_only attaches as a
    reader; max_pins is how many blocks the client may hold at a time. on_error="raise": a store that cannot
    be reached raises Unavailable. on_error="miss": it counts as empty, also when connecting;
    `client.degraded` and the gauge kvclient_degraded are 1 meanwhile. The caller's own errors are raised
    either way. door="socket" sends look-ups to the daemon instead of reading the index.

    owner="engine" has what the client holds counted as an inference engine's. The daemon asks back what it
    holds for longer than pin_deadline_s, and the oldest of what is more than pin_bytes together: such a block
    raises BlockLost where it is looked at next, arrays made before stay as they are, and the client's next
    get lets go of what nobody has an array of. Raises
    InvalidArgument, NotPermitted (also for a namespace that is not there, and for a directory or socket that
    is closed to this user, or that anybody could have made first, as below /tmp, unless it is this user's or
    root's), Unavailable, DeadlineExceeded, IncompatibleVersion.
    """
    if not isinstance(namespace, str) or not 0 < len(os.fsencode(namespace)) < 64 or "\0" in namespace:
        raise InvalidArgument(f"namespace={namespace!r}; it must be a name of 1 to 63 bytes")
    if on_error not in ("raise", "miss"):
        raise InvalidArgument(f'on_error={on_error!r}; it must be "raise" or "miss"')
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout_s={timeout_s!r}; it must be above 0 and at most {MAX_TIMEOUT_S}")
    if not isinstance(max_pins, int) or not 1 <= max_pins <= MAX_PINS:
        raise InvalidArgument(f"max_pins={max_pins!r}; it must be 1 to {MAX_PINS}")
    if owner not in ("client", "engine"):
        raise InvalidArgument(f'owner={owner!r}; it must be "client" or "engine"')
    if pin_deadline_s is not None and not 0.001 <= pin_deadline_s <= MAX_PIN_DEADLINE_S:
        raise InvalidArgument(
            f"pin_deadline_s={pin_deadline_s!r}; it must be None, or 0.001 to {MAX_PIN_DEADLINE_S:.0f}"
        )
    if pin_bytes is not None and not 1 <= pin_bytes < 1 << 63:
        raise InvalidArgument(f"pin_bytes={pin_bytes!r}; it must be None, or at least 1")
    if door not in ("shm", "socket"):
        raise InvalidArgument(f'door={door!r}; it must be "shm" or "socket"')
    from kvclient import _core  # not at import: the fake and the layouts need nothing native

    path = str((default_directory() if dir is None else Path(os.path.expanduser(dir))) / SOCKET_NAME)
    for said in (path, namespace):  # the native part takes nothing else
        try:
            said.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"{said!r} is no UTF-8, which every path and name must be") from None

    def attach() -> Any:
        deadline_ms = 0 if pin_deadline_s is None else round(pin_deadline_s * 1000)
        return _core.Client(
            path, namespace, read_only, max_pins, float(timeout_s), door,
            owner == "engine", deadline_ms, pin_bytes or 0,
        )  # fmt: skip

    return (KVClient if on_error == "raise" else TolerantClient)(attach, namespace, float(timeout_s))
