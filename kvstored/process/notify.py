"""Tells the service supervisor what the daemon does (sd_notify's protocol: one datagram to $NOTIFY_SOCKET).

Owns nothing and never fails: without a supervisor, or with one that does not listen, every call is a no-op.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

TIMEOUT_S = 5.0  # of a supervisor whose queue is full


def notify(message: str, fds: Sequence[int] = ()) -> bool:
    """Sends e.g. "READY=1", with copies of descriptors; whether it was handed over."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or address[0] not in "/@":
        return False
    if address[0] == "@":  # the abstract namespace is written with a leading @
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            # These must arrive; everything else is repeated, or of no use when it is late.
            must = bool(fds) or "READY=1" in message
            sock.settimeout(TIMEOUT_S if must else 0)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sock.sendmsg([message.encode()], rights, 0, address)
        return True
    except OSError:
        return False


def watchdog_interval_s() -> float:
    """Half of the supervisor's limit (what sd_watchdog_enabled(3) recommends), 0 if it does not watch this
    process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0, int(os.environ.get("WATCHDOG_USEC", "0"))) / 2e6
    except ValueError:
        return 0.0
