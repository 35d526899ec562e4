"""Goal: what is assigned to a layer of bfloat16 arrives as these numbers, rounded, or is refused by name;
never as zeros, and never bits as numbers. Method: floats, ints, tensors and bits, through a daemon and the
fake; a process that has no ml_dtypes.
"""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import kvclient
from kvclient.blocks.bfloat16 import bits

LAYOUT = kvclient.Layout(1, 2, 8, "bfloat16", 16)
SHAPE = (2, 2, 16, 8)
NUMBERS = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)


@pytest.fixture(params=["daemon", "fake"])
def client(request, daemon):
    if request.param == "fake":
        with kvclient.InMemoryClient(16 << 20) as fake:
            yield fake
    else:
        with daemon(memory="16MiB").connect() as real:
            yield real


def stored(client, value, where=..., key=bytes(32)):
    """What a reader finds after that assignment."""
    with client.create([key], client.register_layout(LAYOUT)) as writer:
        writer[0].layer(0)[...] = 0
        writer[0].layer(0)[where] = value
    with client.get([key]) as blocks:
        return np.array(blocks[0].layer(0)), blocks[0].tensor(0).clone()


@pytest.mark.parametrize(
    "value",
    [
        NUMBERS,
        NUMBERS.astype(np.float64),
        NUMBERS.astype(ml_dtypes.bfloat16),
        torch.from_numpy(NUMBERS),
        torch.from_numpy(NUMBERS).bfloat16(),
        torch.nn.Parameter(torch.from_numpy(NUMBERS).bfloat16()),
    ],
    ids=["float32", "float64", "bfloat16", "torch float32", "torch bfloat16", "torch parameter"],
)
def test_numbers_arrive_rounded(client, value):
    array, tensor = stored(client, value)
    assert array.dtype == ml_dtypes.bfloat16
    assert torch.equal(tensor, torch.from_numpy(NUMBERS).bfloat16())
    assert np.array_equal(array.astype(np.float32), tensor.float().numpy())


def test_parts_and_scalars(client):
    array, _ = stored(client, 0.3, where=(1, slice(None), 3))
    assert (array[1, :, 3] == ml_dtypes.bfloat16(0.3)).all() and not array[0].any()
    with client.create([bytes([1]) * 32], client.register_layout(LAYOUT)) as writer:
        layer = writer[0].layer(0)
        layer[0][...] = torch.full(SHAPE[1:], 0.5, dtype=torch.bfloat16)
        layer[1] = 7
        assert (layer[0] == 0.5).all() and (layer[1] == 7).all()


def test_bits_are_assigned_to_bits(client):
    wanted = np.arange(512, dtype=np.uint16).reshape(SHAPE)
    with client.create([bytes(32)], client.register_layout(LAYOUT)) as writer:
        layer = writer[0].layer(0)
        with pytest.raises(kvclient.InvalidArgument, match="view"):
            layer[...] = wanted
        with pytest.raises(kvclient.InvalidArgument, match="float64"):
            layer.view(np.uint16)[...] = 0.5
        layer.view(np.uint16)[...] = wanted
        layer.view(np.uint16)[0, 0, 0] = np.zeros(8, ml_dtypes.bfloat16)
        wanted[0, 0, 0] = 0
        assert type(bits(layer)) is np.ndarray and np.array_equal(bits(layer), wanted)
    with client.get([bytes(32)]) as blocks:
        assert np.array_equal(bits(blocks[0].layer(0)), wanted)


def test_without_ml_dtypes_a_float_is_an_error():
    program = """
import sys
sys.modules["ml_dtypes"] = None  # as if it were not installed
import numpy as np, torch, kvclient
with kvclient.InMemoryClient(16 << 20) as client:
    layout = client.register_layout(kvclient.Layout(1, 2, 8, "bfloat16", 16))
    with client.create([bytes(32)], layout) as writer:
        layer = writer[0].layer(0)
        assert layer.dtype == np.uint16
        for value in (0.5, [0.5] * 8, np.ones(8)):
            try:
                layer[...] = value
            except kvclient.InvalidArgument as error:
                assert "ml_dtypes" in str(error)
            else:
                raise AssertionError("taken")
        layer[...] = 0
        layer[0] = torch.full((2, 16, 8), 0.5).bfloat16()
        assert (writer[0].tensor(0)[0] == 0.5).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).resolve().parents[3])
