"""The device that the tests of this folder run on: a GPU, and without one its emulation.

Owns the choice. `cuda` is marked gpu and skipped, with the reason, where there is none; `emulated` is the
same library built by g++ (native/tests/emulation/cuda), the same Python and the same tests over host memory,
so that what first meets a GPU has run before. Invariant: a test asks for its device here and nowhere else.
"""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

from kvclient.kernels import contract

REAL_CPU = contract.cpu
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
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # no call works any more; under xdist another process goes on
        print(f"the device is lost to this process: {error}", file=sys.__stderr__)
        os._exit(70)
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
        pytest.skip("the emulation is not built: `make native-tests`")
    library = emulated()
    monkeypatch.setattr(contract, "cuda", lambda: library)
    monkeypatch.setattr(contract, "cpu", lambda: library)
    yield torch.device("cpu")


@pytest.fixture
def place(device, monkeypatch):
    """Where the models go; on the emulation a CPU that is treated as the GPU."""
    if device.type == "cpu":
        from kvclient.hf.cache import staging
        from kvclient.hf.cache.device import DeviceLayer
        from kvclient.hf.connector import outgoing
        from kvclient.kernels import cuda
        from kvclient.kernels.host_memory import HostMemory

        library = contract.cuda()
        monkeypatch.setattr(contract, "cpu", REAL_CPU)  # the model's other attention and the codec
        monkeypatch.setattr(cuda, "library_for", lambda device: library)
        monkeypatch.setattr(DeviceLayer, "device_type", "cpu")
        monkeypatch.setattr(outgoing, "DEVICES", ("cpu",))
        monkeypatch.setattr(contract, "cuda_lacks", lambda device=0: None)
        memory = HostMemory(library)
        monkeypatch.setattr(staging, "host_memory", lambda: memory)
    return device


@pytest.fixture
def client():
    import kvclient

    return kvclient.InMemoryClient()


@pytest.fixture
def left(monkeypatch):
    """What was counted since the test began."""
    from kvclient.hf import attention

    before = dict(attention.fallbacks())
    return lambda: {
        reason: count - before.get(reason, 0)
        for reason, count in attention.fallbacks().items()
        if count != before.get(reason, 0)
    }
