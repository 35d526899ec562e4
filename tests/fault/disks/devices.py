"""Small real devices and limits for tests: an ext4 file system in a file, a slow one, huge pages, a cgroup.

Owns mounts, loop devices and cgroups, and removes them. Each skips with its reason where the machine has no
such thing or this user may not. Invariant: nothing outside the test's own directory is mounted, limited or
changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")
# linux/fanotify.h
FAN_CLOEXEC, FAN_CLASS_CONTENT, FAN_MARK_ADD = 1, 4, 1
FAN_OPEN_PERM, FAN_EVENT_ON_CHILD, FAN_ONDIR = 0x10000, 0x08000000, 0x40000000
AT_FDCWD = -100


class SmallDisk:
    """An ext4 file system of a few MiB behind a loop device."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.device = device

    def remount(self, how: str) -> None:
        _run("mount", "-o", f"remount,{how}", str(self.path))

    def free_bytes(self) -> int:
        about = os.statvfs(self.path)
        return about.f_bavail * about.f_frsize

    def fill(self, leave_bytes: int) -> Path:
        """Takes all room but a little. The file that does."""
        ballast = self.path / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free_bytes() - leave_bytes))
        return ballast


@contextlib.contextmanager
def huge_memory(place: Path, size_mib: int) -> Iterator[None]:
    """A tmpfs with huge pages over this directory."""
    options = f"huge=within_size,size={size_mib}m,mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs with huge pages: {done.stderr.strip()}")
    try:
        yield
    finally:
        _run("umount", "--lazy", str(place))  # its files may be open still


@contextlib.contextmanager
def small_disk(under: Path, size_mib: int) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    image, path = under / "image", under / "mounted"
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    path.mkdir()
    _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
    device = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    try:
        _run("mount", device, str(path))
        try:
            yield SmallDisk(path, device)
        finally:
            _run("umount", "--lazy", str(path))
    finally:
        subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {command[0]} on this machine")
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Cgroup:
    """A group of processes of one controller (version 1)."""

    def __init__(self, controller: str, path: Path) -> None:
        self._path = path
        self.controller = controller

    def set(self, name: str, value: str) -> None:
        (self._path / name).write_text(value)

    def get(self, name: str) -> str:
        return (self._path / name).read_text().strip()

    def add(self, pid: int) -> None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                (self._path / "tasks").write_text(task.name)

    @property
    def processes(self) -> Path:
        return self._path / "cgroup.procs"


@contextlib.contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    above = CGROUPS / controller
    if not (above / "tasks").exists():
        pytest.skip(f"no cgroup v1 controller {controller} at {above}")
    try:
        path = Path(tempfile.mkdtemp(prefix="kvstored-test-", dir=above))
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {above}: {error}")
    try:
        yield Cgroup(controller, path)
    finally:
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (above / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            path.rmdir()


def numbers_of(path: Path) -> str:
    """MAJOR:MINOR of the device below a path."""
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


@contextlib.contextmanager
def unanswered(directory: Path) -> Iterator[None]:
    """Whoever opens this directory, or a file in it, waits until this ends: a disk that hangs."""
    fanotify = ctypes.CDLL(None, use_errno=True)
    held = fanotify.fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, os.O_RDONLY)
    if held < 0:
        pytest.skip(f"no fanotify: {os.strerror(ctypes.get_errno())}")
    try:
        what = ctypes.c_uint64(FAN_OPEN_PERM | FAN_EVENT_ON_CHILD | FAN_ONDIR)
        if fanotify.fanotify_mark(held, FAN_MARK_ADD, what, AT_FDCWD, os.fsencode(directory)) != 0:
            pytest.skip(f"no waiting for fanotify: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        os.close(held)  # and all of them go on
