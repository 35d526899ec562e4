"""What this machine's processors can run, decided before the tests begin.

Owns the choice of the cases that differ in nothing but the instruction set or the device: those whose path
this machine lacks are left out and said in one line at the end, not skipped one by one; of those that an
emulation runs, the first of each test and every SHARE-th stay, by a hash of its name, unless `--whole` is
asked for. Never looks at what a test does. Invariant: every process of `pytest -n` chooses the same.
"""

from __future__ import annotations

import zlib
from collections import Counter
from functools import cache

import pytest

EMULATED_SHARE = 24  # of a processor's cases: the paths of this processor run them all
EMULATED_GPU_SHARE = 6
EMULATED_GPU = "tests/kernels/cuda/test_cuda_attention.py"  # all of it
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases, also of what is emulated or alike")


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether all cases are asked for, as by `make test-all`."""
    return request.config.getoption("--whole")


@cache
def _lacks(path: str) -> str:
    from kvclient import kernels

    return kernels.lacks(path) or ""


@cache
def _cuda_lacks() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def _sampled(item: pytest.Item, on: str, share: int, seen: set[tuple[str, str]]) -> bool:
    """Whether this case is one of those that stay. seen: of which tests one did, and on what."""
    test = item.nodeid.partition("[")[0]
    first = (test, on) not in seen
    seen.add((test, on))
    return first or zlib.crc32(item.nodeid.encode()) % share == 0


def _left_out(item: pytest.Item, whole: bool, seen: set[tuple[str, str]]) -> str | None:
    """Why this case is not run here; None if it is. seen: as _sampled() has it."""
    from tests.kernels import cpu_paths

    called = getattr(item, "callspec", None)
    parameters = called.params if called is not None else {}
    path = parameters.get("path")
    if isinstance(path, str) and path in cpu_paths.PATHS and (lacking := _lacks(path)):
        if path not in cpu_paths.EMULATED:
            return f"{path}: {lacking}"
        if beneath := _lacks("avx512_vnni"):  # the emulation stands on it
            return f"{path}: {beneath}"
        if not whole and not _sampled(item, path, EMULATED_SHARE, seen):
            return f"{path}, emulated: all of them in `make test-all`"
    on_gpu = parameters.get("device") == "cuda" or "gpu" in getattr(item, "fixturenames", ())
    if on_gpu and (lacking := _cuda_lacks()):
        return lacking
    emulated = parameters.get("device") == "emulated" or (parameters and EMULATED_GPU in item.nodeid)
    if emulated and not whole and not _sampled(item, "gpu", EMULATED_GPU_SHARE, seen):
        return "GPU, emulated: all of them in `make test-all`"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = config.getoption("--whole")
    seen: set[tuple[str, str]] = set()
    reasons = [_left_out(item, whole, seen) for item in items]
    config.stash[LEFT_OUT] = Counter(reason for reason in reasons if reason)
    gone = [item for item, reason in zip(items, reasons, strict=True) if reason]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of `pytest -n` tells the one that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    if told := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = Counter(told)  # type: ignore[attr-defined]  # the same in each


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if counts := config.stash.get(LEFT_OUT, Counter()):
        each = "; ".join(f"{count} {reason}" for reason, count in counts.most_common())
        terminalreporter.write_line(f"left out {counts.total()} cases: {each}")
