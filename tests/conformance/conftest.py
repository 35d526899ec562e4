"""One daemon for all cases of a door: each case ends with the memory in use exactly as before, so they share
it.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Daemon

MEMORY = "24MiB"


@pytest.fixture(scope="class")
def shared_daemon() -> Iterator[Callable[[], Daemon]]:
    base = Path(tempfile.mkdtemp(prefix="kvstored-test-"))
    (base / "d").mkdir()
    daemon = Daemon(base / "d", MEMORY, ("--max-blocks", "8192", "--namespaces", "default:writers=12345"), {})
    try:
        yield daemon.start()
    finally:
        print(daemon.log())
        daemon.stop()
        daemon.remove()
        shutil.rmtree(base, ignore_errors=True)
