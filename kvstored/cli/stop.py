"""`kvstored stop`: ends the daemon of a runtime directory, says what stays of it, and frees that if asked.

Owns the signal. Never asks over gRPC: a daemon that hangs must end too. Invariant: no process is signalled
that is not the daemon of this directory.
"""

from __future__ import annotations

import argparse
import os
import select
import signal

from kvstored import log
from kvstored.cli.answers import complain, show
from kvstored.config.config import Config
from kvstored.config.units import approximate_size
from kvstored.errors import Exit
from kvstored.process import runtime_dir
from kvstored.tiers import pool_list


def nobody_in(directory: str) -> str:
    return (
        f"no daemon in {directory}: start one with `kvstored serve --dir {directory}`, or name another's "
        "directory by --dir or KVSTORED_DIR"
    )


def run(arguments: argparse.Namespace, directory: str) -> int:
    pid = runtime_dir.running_pid(directory)
    if pid is not None and (code := _ended(pid, arguments, directory)) != Exit.DONE:
        return code
    with runtime_dir.as_its_user(directory):
        kept_bytes, freed_bytes = pool_list.kept_bytes(directory), 0
        if pid is None and not (arguments.discard and kept_bytes):
            return complain(nobody_in(directory), Exit.UNREACHABLE, arguments)
        if arguments.discard and kept_bytes:
            _discard(directory)
            before, kept_bytes = kept_bytes, pool_list.kept_bytes(directory)
            freed_bytes = before - kept_bytes
    ended = "no daemon ran" if pid is None else f"pid {pid} has ended"
    stays = f"; {approximate_size(freed_bytes)} freed" if freed_bytes else ""
    if kept_bytes:
        size = approximate_size(kept_bytes)
        more = "for the next daemon: kvstored stop --discard frees them"
        stays += f"; {size} of shared memory stay " + ("all the same" if arguments.discard else more)
    show(
        arguments,
        {"stopped": pid, "kept_bytes": kept_bytes, "freed_bytes": freed_bytes},
        ended + stays,
    )
    return Exit.NO if arguments.discard and kept_bytes else Exit.DONE


def _ended(pid: int, arguments: argparse.Namespace, directory: str) -> Exit:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return complain(nobody_in(directory), Exit.UNREACHABLE, arguments)
    try:
        # The descriptor names one process for ever, and that it holds the lock is checked after it is open:
        # no other pid can be hit.
        if runtime_dir.running_pid(directory) != pid:
            return complain(f"the daemon in {directory} has just ended", Exit.UNREACHABLE, arguments)
        if not runtime_dir.belongs(pid, directory):
            return complain(f"pid {pid} is not of the user who owns {directory}", Exit.REFUSED, arguments)
        if (found := runtime_dir.listening_pid(directory)) not in (None, pid):
            where = f"is pid {found} here" if found else "has no pid here: it runs in a container"
            return complain(f"the daemon in {directory} says pid {pid} and {where}", Exit.REFUSED, arguments)
        if not runtime_dir.holds_lock(pid, directory):
            why = f"does not hold the lock of {directory}: a daemon starts there now, and an earlier one left"
            return complain(f"pid {pid} {why} this number: try again", Exit.REFUSED, arguments)
        signal.pidfd_send_signal(watched, signal.SIGTERM)
        if not select.select([watched], [], [], arguments.timeout_s)[0]:
            return complain(
                f"pid {pid} still runs {arguments.timeout_s} s after SIGTERM", Exit.REFUSED, arguments
            )
    except PermissionError:
        return complain(f"pid {pid} belongs to another user", Exit.REFUSED, arguments)
    finally:
        os.close(watched)
    return Exit.DONE


def _discard(directory: str) -> None:
    """As a start without namespaces: whatever this directory's daemons left is retired and removed. Raises
    StartupError if a daemon has started meanwhile."""
    from kvstored import _core  # other commands work without the native part
    from kvstored.tiers.pools import Segments

    lock = runtime_dir.Lock(directory)
    try:
        log.set_level("error")  # what is removed the command says itself
        left = Segments(Config(dir=directory, state_dir=directory), [], _core.Store.retire)
        left.open(fresh=True)
        left.discard()
    finally:
        lock.close()
