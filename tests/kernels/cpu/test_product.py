"""Proves that the CPU multiplies a few rows with a matrix in 16 bits, on every path of this machine.

Method: random numbers in both types; the oracle multiplies them in double. The same rows alone, beside
others, on other numbers of threads and over a part of the matrix must come back with the same bits.
"""

import numpy as np
import pytest

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract, linear

HERE = [name for name in contract.PATHS[1:] if contract.lacks(name) is None]
SIZES = [(1, 1), (7, 31), (8, 32), (77, 96), (40, 130), (19, 2080), (9, 0)]  # a page of weights has 2,048
ALIKE = [name for name in HERE if name != "reference"]  # which sums in double


def matrix(dtype, outputs, inputs):
    """As it is given to the call, and its numbers."""
    held = np.random.default_rng(outputs + inputs).standard_normal((outputs, inputs)).astype(np.float32)
    if dtype == "float16":
        return held.astype(np.float16), held.astype(np.float16).astype(np.float64)
    bits = (held.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rows_times_a_matrix(path, dtype, outputs, inputs):
    weights, numbers = matrix(dtype, outputs, inputs)
    x = np.random.default_rng(1).standard_normal((17, inputs)).astype(np.float32)
    whole = linear.multiply_halves(x, weights, path=path)
    bound = 2.0**-20 * (np.abs(x).astype(np.float64) @ np.abs(numbers).T)
    assert (np.abs(whole - x.astype(np.float64) @ numbers.T) <= bound).all()
    for rows in range(17):
        alone = linear.multiply_halves(x[:rows], weights, threads=rows % 4, path=path)
        assert np.array_equal(alone, whole[:rows]), rows
    for start, stop in ((0, outputs), (outputs // 3, outputs), (outputs // 2, outputs // 2 + 1)):
        assert np.array_equal(
            linear.multiply_halves(x[:5], weights[start:stop], path=path), whole[:5, start:stop]
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_more_than_one_task_on_several_threads(dtype):
    weights, numbers = matrix(dtype, 3001, 512)
    x = np.random.default_rng(2).standard_normal((3, 512)).astype(np.float32)
    found = [linear.multiply_halves(x, weights, threads, path) for path in ALIKE for threads in (1, 2, 5)]
    assert np.abs(found[0] - x @ numbers.T).max() <= 1e-3
    assert all(np.array_equal(found[0], other) for other in found[1:]), "paths but the naive one agree"


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row_or_its_output(path, wrong):
    weights, _ = matrix("float16", 24, 64)
    x = np.ones((4, 64), np.float32)
    well = linear.multiply_halves(x, weights, path=path)
    x[2, 5], weights[7, 3] = wrong, wrong
    found = linear.multiply_halves(x, weights, path=path)
    assert not np.isfinite(found[2]).any() and not np.isfinite(found[:, 7]).any()
    kept = np.ix_([0, 1, 3], [i for i in range(24) if i != 7])
    assert np.array_equal(found[kept], well[kept])


def test_what_does_not_fit_is_refused():
    weights, x = np.zeros((8, 32), np.float16), np.zeros((2, 32), np.float32)
    for args, said in (
        ((x, weights.astype(np.float32)), "weights are float32"),
        ((x, weights[:, ::2]), "weights are float16"),
        ((x, weights[0]), "weights are float16"),
        ((x.astype(np.float64), weights), "x is float64"),
        ((x[:, :16], weights), "x is float32"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            linear.multiply_halves(*args)
