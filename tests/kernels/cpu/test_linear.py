"""Proves that the CPU's linear layers and norms compute what they say, on every path of this machine.

Method: random rows and weights against NumPy in double; in bf16 against torch, within one unit in the last
place; in tiles by emulation where this CPU has none. The same rows alone, beside others and on other numbers
of threads must come back with the same bits: by that a server computes requests side by side.
"""

import numpy as np
import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract, linear
from tests.kernels.cpu_paths import PATHS, provide

HERE = [name for name in contract.PATHS[1:] if contract.lacks(name) is None]
SHAPES = [(16, 1), (48, 3), (64, 4), (576, 67), (1536, 130), (2048, 64), (2064, 9), (4112, 70)]
IN_TILES = [*SHAPES, (80, 5), (4096, 48)]  # the last: whole tiles, and two stretches of inputs


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def halves(*shape, seed=0):
    """(bf16 as its bits, the same as torch's tensor)."""
    tensor = torch.from_numpy(numbers(*shape, seed=seed)).bfloat16()
    return bits(tensor), tensor


def bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


def places(found):
    """bf16's bits as whole numbers in their order, a unit in the last place apart."""
    found = found.astype(np.int32)
    return np.where(found < 0x8000, found, 0x8000 - found)


def units_apart(found, wanted):
    return np.abs(places(found) - places(wanted))


def silu(x):
    return x / (1 + np.exp(-x))


def near(found, wanted, x, w):
    """Within the rounding of so many products in fp32."""
    bound = 2.0**-20 * (np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T) + 1e-6
    return (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_times_weights(path, inputs, outputs):
    x, w, bias = numbers(201, inputs), numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    for added in (None, bias):
        wanted = x.astype(np.float64) @ w.astype(np.float64).T + (0 if added is None else added)
        whole = linear.multiply(x, w, added, path=path)
        assert near(whole, wanted, x, w)
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 95, 97, 200):
            some = linear.multiply(x[:rows], w, added, threads=rows % 4, path=path)
            assert np.array_equal(some, whole[:rows]), rows
            last = linear.multiply(x[201 - rows :], w, added, path=path)
            assert np.array_equal(last, whole[201 - rows :]), rows


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_gated_half_of_an_mlp(path, inputs, outputs):
    x, w, up = (
        numbers(130, inputs),
        numbers(outputs, inputs, seed=1) / 16,
        numbers(outputs, inputs, seed=2) / 16,
    )
    bias, up_bias = numbers(outputs, seed=3), numbers(outputs, seed=4)
    for first, second in ((None, None), (bias, up_bias)):
        gate, held = (x.astype(np.float64) @ m.astype(np.float64).T for m in (w, up))
        if first is not None:
            gate, held = gate + first, held + second
        whole = linear.multiply(x, w, first, up, second, path=path)
        assert np.allclose(whole, silu(gate) * held, rtol=1e-4, atol=1e-5 * np.abs(held).max())
        for rows in (1, 2, 3, 5, 8, 97):
            some = linear.multiply(x[:rows], w, first, up, second, threads=3, path=path)
            assert np.array_equal(some, whole[:rows]), rows


@pytest.mark.parametrize("path", HERE)
def test_gates_far_from_zero(path):
    """silu of what no power of two can hold is 0, or the number itself; what is no number stays none."""
    x = np.zeros((6, 16), np.float32)
    x[:, 0] = [-1e4, -100, 100, 1e4, np.nan, -3e38]
    w = np.zeros((1, 16), np.float32)
    w[0, 0] = 1
    up = np.zeros((1, 16), np.float32)
    found = linear.multiply(x, w, None, up, np.ones(1, np.float32), path=path)[:, 0]
    assert np.allclose(found[:4], [0, 0, 100, 1e4]) and np.isnan(found[4])
    assert found[5] == 0


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_of_minus_infinity_is_no_number_as_torchs(path, dtype):
    """By a bias, so that no product is what loses it; in the lanes of a vector and behind them."""
    x, w, up = (torch.zeros(rows, 16, dtype=dtype) for rows in (3, 37, 37))
    bias, ones = torch.linspace(-30, 30, 37).to(dtype), torch.ones(37, dtype=dtype)
    bias[[0, 17, 36]] = -torch.inf
    bias[20] = torch.inf
    held = [each.numpy() if dtype is torch.float32 else bits(each) for each in (x, w, bias, up, ones)]
    found = linear.multiply(*held, path=path)
    found = torch.from_numpy(found if dtype is torch.float32 else found.view(np.int16)).view(dtype)
    wanted = torch.nn.functional.silu(bias).expand(3, -1)
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().sum() == 9
    assert torch.allclose(found.nan_to_num(), wanted.nan_to_num(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("width", [1, 16, 31, 576, 1000])
def test_rows_over_the_root_of_their_mean_square(path, width):
    x, weight = numbers(131, width) * 3, numbers(width, seed=1)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    whole = linear.normalise(x, weight, 1e-5, path=path)
    assert np.allclose(whole, weight * (x / root), rtol=2e-6, atol=1e-6)
    for rows in (0, 1, 2, 64, 65, 130):
        assert np.array_equal(linear.normalise(x[:rows], weight, 1e-5, threads=3, path=path), whole[:rows])


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("head_dim", [32, 64, 160])
def test_heads_turned_to_their_positions(path, head_dim):
    """To the bit: each product and sum is rounded, as torch and NumPy do."""
    q, k = numbers(70, 3, head_dim), numbers(70, 1, head_dim, seed=1)
    cos, sin = numbers(70, head_dim, seed=2), numbers(70, head_dim, seed=3)
    half = head_dim // 2
    wanted = [
        x * cos[:, None] + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin[:, None] for x in (q, k)
    ]
    linear.turn(q, k, cos, sin, threads=3, path=path)
    assert np.array_equal(q, wanted[0]) and np.array_equal(k, wanted[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("inputs", "outputs"), IN_TILES)
def test_rows_times_weights_in_bf16(path, inputs, outputs, monkeypatch):
    path = provide(path, monkeypatch)
    (x, tx), (w, tw), (bias, tb) = (
        halves(131, inputs),
        halves(outputs, inputs, seed=1),
        halves(outputs, seed=2),
    )
    for added, added_torch in ((None, None), (bias, tb)):
        exact = tx.double() @ tw.double().T + (0 if added is None else added_torch.double())
        bound = 2.0**-20 * (tx.double().abs() @ tw.double().abs().T) + 1e-6  # of sums in fp32
        least, most = (places(bits((exact + off).bfloat16())) for off in (-bound, bound))
        whole = linear.multiply(x, w, added, path=path)
        assert (least <= places(whole)).all() and (places(whole) <= most).all()
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 32, 33, 97, 130):
            some = linear.multiply(x[:rows], w, added, threads=rows % 4, path=path)
            assert np.array_equal(some, whole[:rows]), rows


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_gated_half_of_an_mlp_in_bf16(path, inputs, outputs, monkeypatch):
    path = provide(path, monkeypatch)
    """Rounded where torch rounds: both products, silu, what comes out."""
    (x, tx), (w, tw), (up, tu) = (
        halves(40, inputs),
        halves(outputs, inputs, seed=1),
        halves(outputs, inputs, seed=2),
    )
    whole = linear.multiply(x, w, None, up, path=path)
    gate, held = ((tx.double() @ weights.double().T).bfloat16() for weights in (tw, tu))
    wanted = torch.nn.functional.silu(gate) * held
    apart = units_apart(whole, bits(wanted))
    assert np.percentile(apart, 90) <= 1  # a product that was rounded to its other neighbour: some more
    found = torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16).double()
    assert ((found - wanted.double()).abs() <= 2.0**-6 * (wanted.double().abs() + 1e-2)).all()
    for rows in (1, 2, 3, 5, 8, 39):
        assert np.array_equal(linear.multiply(x[:rows], w, None, up, threads=3, path=path), whole[:rows])


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("width", [1, 16, 31, 576, 1000])
def test_norms_in_bf16(path, width):
    (x, tx), (weight, tw) = halves(131, width), halves(width, seed=1)
    over = tx.float() * torch.rsqrt(tx.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    wanted = bits(tw * over.bfloat16())
    whole = linear.normalise(x, weight, 1e-5, path=path)
    apart = units_apart(whole, wanted)
    assert apart.max() <= 2 and (apart > 0).mean() <= 0.01  # both products round, and so may move by one each
    for rows in (0, 1, 2, 64, 65, 130):
        assert np.array_equal(linear.normalise(x[:rows], weight, 1e-5, threads=3, path=path), whole[:rows])


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("head_dim", [32, 64, 160])
def test_heads_in_bf16_turned_as_torch_turns_them(path, head_dim):
    """To the bit, on every path."""
    heads = [halves(70, count, head_dim, seed=count) for count in (3, 1)]
    (cos, tc), (sin, ts) = (halves(70, head_dim, seed=seed) for seed in (7, 8))
    half = head_dim // 2
    wanted = [
        (x * tc[:, None]) + (torch.cat((-x[..., half:], x[..., :half]), -1) * ts[:, None]) for _, x in heads
    ]
    wanted = [bits(x) for x in wanted]
    (q, _), (k, _) = heads
    linear.turn(q, k, cos, sin, threads=3, path=path)
    assert np.array_equal(q, wanted[0]) and np.array_equal(k, wanted[1])


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_in_bf16_stays_in_its_row(path, wrong):
    (x, tx), (w, _) = halves(9, 64), halves(20, 64, seed=1)
    well = linear.multiply(x, w, path=path)
    tx[4, 7] = wrong
    x = bits(tx)
    found = linear.multiply(x, w, path=path)
    assert ((found[4] & 0x7F80) == 0x7F80).all()
    assert np.array_equal(np.delete(found, 4, 0), np.delete(well, 4, 0))
    normed = linear.normalise(x, w[0], 1e-5, path=path)
    assert ((normed[4, 7] & 0x7F80) == 0x7F80) and np.isfinite(np.delete(normed, 4, 0).astype(float)).all()


def test_what_may_not_be_written_is_not_turned():
    q, k, angles = numbers(2, 3, 64), numbers(2, 1, 64), numbers(2, 64)
    kept = q.copy()
    for name in ("q", "k"):
        held = {"q": q.copy(), "k": k.copy()}
        held[name].flags.writeable = False
        with pytest.raises(InvalidArgument, match=f"{name} is read-only"):
            linear.turn(held["q"], held["k"], angles, angles)
        assert np.array_equal(held["q"], kept)
    memory = numbers(2, 4, 64)
    for turned in ((q, q), (memory[:, :3].copy(), angles[:, None])):
        with pytest.raises(InvalidArgument, match="share memory"):
            linear.turn(*turned, angles, angles)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row(path, wrong):
    x, w = numbers(9, 64), numbers(20, 64, seed=1)
    well = linear.multiply(x, w, path=path)
    x[4, 7] = wrong
    found = linear.multiply(x, w, path=path)
    assert not np.isfinite(found[4]).any()
    assert np.array_equal(np.delete(found, 4, 0), np.delete(well, 4, 0))


def test_what_does_not_fit_is_refused():
    x, w = numbers(2, 64), numbers(8, 64)
    for args, said in (
        ((x[:, :32], w), "strided"),
        ((x[:, :32].copy(), w), "x is float32"),
        ((x.astype(np.float64), w), "x is float64"),
        ((x, w, w[0]), "bias is float32"),
        ((x, w, None, w[:4]), "up is float32"),
        ((x[0], w), "rows of inputs"),
        ((numbers(2, 24), numbers(8, 24)), "a multiple of 16"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            linear.multiply(*args)
    for args, said in (((x, w[0, :32], 0), "weight is float32"), ((x[0], w[0], 0), "it must have rows")):
        with pytest.raises(InvalidArgument, match=said):
            linear.normalise(*args)
    q, k, angles = numbers(2, 3, 64), numbers(2, 1, 64), numbers(2, 64)
    for args, said in (
        ((q[0], k, angles, angles), "rows of heads"),
        ((q, k[:1], angles, angles), "k is float32"),
        ((q, k, angles[:1], angles), "cos is float32"),
        ((q, k, angles, angles.astype(np.float64)), "sin is float64"),
        ((numbers(2, 3, 48), numbers(2, 1, 48), numbers(2, 48), numbers(2, 48)), "a multiple of 32"),
        ((q, k, angles.view(np.int32), angles), "cos is int32"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            linear.turn(*args)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("inputs", "outputs"), IN_TILES)
def test_rows_in_bf16_times_weights_that_are_rounded_to_it(path, inputs, outputs, monkeypatch):
    path = provide(path, monkeypatch)
    (x, tx), w, bias = halves(201, inputs), numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    rounded = torch.from_numpy(w).bfloat16().float().numpy()
    for added in (None, bias):
        wanted = tx.double().numpy() @ rounded.astype(np.float64).T + (0 if added is None else added)
        whole = linear.multiply(x, w, added, path=path)
        assert whole.dtype == np.float32 and near(whole, wanted, tx.float().numpy(), w)
        for rows in (0, 1, 2, 3, 6, 7, 8, 13, 16, 17, 31, 32, 33, 95, 97, 200):
            some = linear.multiply(x[:rows], w, added, threads=rows % 4, path=path)
            assert np.array_equal(some, whole[:rows]), rows
    with pytest.raises(contract.Unsupported):
        linear.multiply(x, w, None, w, path=path)
