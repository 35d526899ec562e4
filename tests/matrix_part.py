"""Which cases of the matrix of architectures run without `--whole`.

A test marked `matrix(third, always...)` is made for each architecture (its parameter `name`): those named in
the mark always run, of the others the third with that number, by a hash of the name. So tests with all three
numbers have every architecture among them. Who names a case gets it. Never looks at what a test does.
Invariant: a case stays or not whatever else was collected (`--last-failed`).
"""

import zlib

import pytest

from tests.processors import LEFT_OUT

REASON = "of other architectures: all of them in `make test-all`"


def _stays(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("matrix")
    if mark is None:
        return True
    third, *always = mark.args
    name = item.callspec.params["name"]  # type: ignore[attr-defined]  # marked tests have parameters
    return name in always or zlib.crc32(name.encode()) % 3 == third


@pytest.hookimpl(trylast=True)  # behind tests/processors.py, whose count this goes on with
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole") or any("::" in name for name in config.args):
        return
    gone = [item for item in items if not _stays(item)]
    if gone:
        config.stash[LEFT_OUT][REASON] += len(gone)
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if _stays(item)]
