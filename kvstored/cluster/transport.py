"""How Mooncake moves the pool's bytes: over RDMA where every host of the cluster can, else over TCP.

Owns the choice, and the environment by which Mooncake hears of it: its engine takes no notice of the protocol
that it is given, but uses RDMA wherever it finds a device, and TCP where it finds none or is told to. Never
loads Mooncake. Invariant: what is told of a host is what its process does, not what was wished.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RDMA, TCP = "rdma", "tcp"
DEVICES = Path("/sys/class/infiniband")  # what the kernel has
DOORS = Path("/dev/infiniband")  # by which a process reaches them; a container may have none
DESCRIPTORS = Path("/proc/self/fd")
FORCE_TCP = "MC_FORCE_TCP"


class Transport(NamedTuple):
    """What Mooncake is asked for."""

    name: str
    devices: tuple[str, ...] = ()
    why: str = ""  # it is not RDMA


def active(devices: Path = DEVICES) -> tuple[str, ...]:
    """The devices that have a port which is up, by name."""
    found = []
    for device in sorted(devices.glob("*")):
        for state in device.glob("ports/*/state"):
            try:
                up = "ACTIVE" in state.read_text()
            except OSError:  # it goes
                continue
            if up:
                found.append(device.name)
                break
    return tuple(found)


def choose(others: Iterable[str], devices: Path = DEVICES, doors: Path = DOORS) -> Transport:
    """`others`: what the cluster's other hosts use. One that uses TCP can read nothing of one that uses RDMA,
    nor the other way round, so all use the same."""
    found = active(devices)
    if FORCE_TCP in os.environ:
        return Transport(TCP, why=f"{FORCE_TCP} is set")
    if not found:
        return Transport(TCP, why="no device with a port that is up")
    if not any(doors.glob("uverbs*")):
        return Transport(TCP, why=f"{','.join(found)} cannot be reached from here: no uverbs in {doors}")
    if any(other != RDMA for other in others):
        return Transport(TCP, why="another host of the cluster uses TCP")
    return Transport(RDMA, found)


def tell(transport: Transport) -> None:
    """Mooncake, before it makes an engine."""
    if transport.name != RDMA:
        os.environ[FORCE_TCP] = "1"


def in_use(doors: Path = DOORS, descriptors: Path = DESCRIPTORS) -> str:
    """By what this process has open."""
    for descriptor in descriptors.glob("*"):
        try:
            at = descriptor.readlink()
        except OSError:  # closed meanwhile
            continue
        if at.parent == doors and at.name.startswith("uverbs"):
            return RDMA
    return TCP
