"""What a process has open. It goes on opening and closing while it is looked at: a descriptor that is gone
before its name was read is none.
"""

import contextlib
import os
from pathlib import Path


def descriptors(pid: int) -> list[str]:
    """What each descriptor of `pid` leads to, as the kernel writes it."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return found


def sockets(pid: int) -> set[str]:
    """Inodes of its sockets, as the tables of /proc/PID/net have them."""
    return {target[8:-1] for target in descriptors(pid) if target.startswith("socket:[")}
