"""The device that the tests of this folder run on: a GPU, and without one its emulation.

Owns the choice. `cuda` is marked gpu and skipped, with the reason, where there is none; `emulated` is the
same library built by g++ (native/cuda/emulation), the same Python and the same tests over host memory, so
that what first meets a GPU has run before. Invariant: a test asks for its device here and nowhere else.
"""

import ctypes
from pathlib import Path

import pytest
import torch

from kvclient.kernels import contract

EMULATION = Path(__file__).resolve().parents[2] / "build/dev/emulation/cuda.so"


def emulated() -> ctypes.CDLL:
    return contract.opened(EMULATION, "CUDA", contract.CUDA_FUNCTIONS)


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


def usable() -> torch.device:
    """A CUDA device that the library has code for, or a skip that says what is lacking."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if reason := contract.cuda_lacks():
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gpu():
    yield usable()
    torch.cuda.synchronize()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cuda":
        yield usable()
        torch.cuda.synchronize()
        return
    if not EMULATION.exists():
        pytest.skip("the emulation is not built: `make build`")
    library = emulated()
    monkeypatch.setattr(contract, "cuda", lambda: library)
    monkeypatch.setattr(contract, "cpu", lambda: library)
    yield torch.device("cpu")
