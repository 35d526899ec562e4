"""Daemons that know each other, started once for all tests of a file: what those leave is of other keys."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import BASE_NAME, Daemon, wait_for
from tests.hosts.hosts import Hosts


@pytest.fixture(scope="module")
def pair_of_hosts() -> Iterator[Hosts]:
    """Two that are up. A test may kill none of them."""
    base, made = Path(tempfile.mkdtemp(prefix=BASE_NAME)), []

    def make(memory: str, args: list[str], start: bool) -> Daemon:
        (base / f"d{len(made)}").mkdir()
        made.append(Daemon(base / f"d{len(made)}", memory, (*args, "--max-blocks", "8192"), {}))
        return made[-1]

    try:
        yield Hosts(make, base).start().wait_up(wait_for)
    finally:
        for daemon in made:
            daemon.stop()
            daemon.remove()
        shutil.rmtree(base, ignore_errors=True)
