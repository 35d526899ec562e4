"""The order in which files of tests begin: folders that take long first, what waits beside what computes.

`pytest -n` hands out whole files. What takes a minute must not begin last, when the other processes have
nothing left to do; and where all of them wait for deadlines at one time, or all compute, the processors are
idle first and crowded then. Owns the order of folders, by processor seconds as measured; within a folder
nothing moves. Never chooses what runs. Invariant: the same order in every process of `pytest -n`.
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
ALONE = "tests/fault/disks/test_disk_devices.py"  # has such tests: behind those in C++, which hold the room
# For daemons, deadlines and disks, most of their time. They are spread evenly among the others.
WAITING = ("tests/daemon/", "tests/fault/", "tests/hostile/", "tests/hosts/", "tests/soak/")


def place(file: str) -> int:
    """Of the file's folder in LONGEST; len(LONGEST) if it is in none."""
    return next((at for at, begins in enumerate(LONGEST) if file.startswith(begins)), len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    ordered = sorted(files, key=place)
    begins: dict[str, float] = {}  # as a share of all of its kind
    for waits in (True, False):
        kind = [file for file in ordered if file.startswith(WAITING) is waits]
        last = 0.8 if waits else 1.0  # a minute of waiting does not begin at the end
        begins |= {file: last * at / len(kind) for at, file in enumerate(kind)}
    if ALONE in begins:
        begins[ALONE] = max(begins[ALONE], 0.5)
    items[:] = [item for file in sorted(begins, key=lambda file: begins[file]) for item in files[file]]
