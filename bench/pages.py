"""Memory made of huge pages, for whoever takes a directory: a tmpfs of its own, as deploy/systemd mounts one.

Owns the mount while the context is open. Needs root; says why where it cannot.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def huge_tmpfs(place: Path, room_bytes: int) -> Iterator[None]:
    """Mounted over `place`. RuntimeError says why there is none."""
    options = f"huge=within_size,size={room_bytes},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"no tmpfs with huge pages: {done.stderr.strip()[-120:]}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)  # a killed contender may have it open still


def huge_pages_to_be_had() -> bool:
    with tempfile.TemporaryDirectory() as place:
        try:
            with huge_tmpfs(Path(place), 2 << 20):
                return True
        except RuntimeError:
            return False
