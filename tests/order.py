"""The order in which files of tests begin: folders that take long first.

`pytest -n` hands out whole files. What takes a minute must not begin last, when the other processes have
nothing left to do. Owns the order of folders, by processor seconds as measured; within a folder nothing
moves. Never chooses what runs. Invariant: the same order in every process of `pytest -n`.
"""

import pytest

# Files with single long tests, then folders; what is named nowhere comes after all of these.
LONGEST = (
    "tests/hf/models/test_smollm2.py",
    "tests/serve/",
    "tests/hf/attachment/",
    "tests/hf/models/",
    "tests/fault/",
    "tests/hf/",
    "tests/hosts/",
    "tests/conformance/",
    "tests/daemon/",
    "tests/kernels/",
)


def place(nodeid: str) -> int:
    """Of the file's folder in LONGEST; len(LONGEST) if it is in none."""
    return next((at for at, begins in enumerate(LONGEST) if nodeid.startswith(begins)), len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))
