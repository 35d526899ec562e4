"""Proves that AWQ layers on a GPU compute what their checkpoint's words stand for.

Method: (q - z) * s in double is the oracle; repacking against the same permutation written with torch;
dequantising byte for byte against the layer on a CPU; each fast kernel beside its naive one, at every number
of rows where another kernel begins; what the kernels do not take is computed by torch and counted.
"""

import threading

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from kvclient.errors import InvalidArgument
from kvclient.hf import awq
from kvclient.hf.awq import linear
from kvclient.kernels import contract, cuda

SHAPES = [(128, 16, 64), (256, 96, 128), (768, 8448, 128), (192, 32, 192)]
HALVES = [torch.float16, torch.bfloat16]


def layer_of(inputs, outputs, group, bias=False, dtype=torch.float16):
    generator = torch.Generator().manual_seed(inputs + outputs)
    layer = awq.AwqLinear(inputs, outputs, group, bias, dtype)
    for name in ("qweight", "qzeros"):
        words = getattr(layer, name)
        words.copy_(torch.randint(-(1 << 31), 1 << 31, words.shape, generator=generator))
    layer.scales.copy_(torch.rand(layer.scales.shape, generator=generator) * 0.02 + 0.001)
    if bias:
        layer.bias.data = torch.randn(outputs, generator=generator).to(dtype)
    return layer


def exact_weights(layer):
    codes = awq.unpack(layer.qweight).double()
    zeros = awq.unpack(layer.qzeros).double().repeat_interleave(layer.group, 0)
    return (codes - zeros) * layer.scales.double().repeat_interleave(layer.group, 0)


def packed(layer, device):
    parts = [part.to(device) for part in (layer.qweight, layer.qzeros, layer.scales)]
    return parts[0], (cuda.awq_repack(parts[0], layer.group), *parts[1:])


@pytest.fixture
def chosen(device, monkeypatch):
    """The layer takes the kernels for tensors of that device; on the emulation for a CPU's."""
    monkeypatch.setattr(cuda, "DEVICES", (device.type,))
    if device.type == "cpu":
        monkeypatch.setattr(linear, "_no_kernels", lambda device: None)


@pytest.mark.parametrize("shape", SHAPES)
def test_repacking_is_the_published_permutation(device, shape):
    layer = layer_of(*shape)
    assert torch.equal(packed(layer, device)[1][0].cpu(), awq.to_lanes(layer.qweight))


def test_words_that_lie_apart_are_reordered_as_any(device):
    layer = layer_of(128, 96, 64)
    apart = layer.qweight.t().contiguous().t().to(device)
    assert not apart.is_contiguous()
    found = cuda.awq_repack(apart, 64)
    assert found.is_contiguous() and torch.equal(found.cpu(), awq.to_lanes(layer.qweight))
    with pytest.raises(InvalidArgument, match="expected int32"):
        cuda.awq_repack(layer.scales.to(device), 64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_dequantised_weights_are_the_layers_on_a_cpu(device, shape, dtype):
    layer = layer_of(*shape)
    words, parts = packed(layer, device)
    wanted = layer.weights(0, layer.out_features, dtype).t()
    for weights in (
        cuda.awq_dequantise(*parts, layer.group, dtype),
        cuda.awq_dequantise(words, *parts[1:], layer.group, dtype, cuda.NAIVE),
    ):
        assert torch.equal(weights.cpu(), wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 16, 17, 32, 33, 64])
def test_products(device, shape, dtype, rows):
    if shape[1] > 1000 and device.type == "cpu":
        shape = (128, *shape[1:])  # as many strips of outputs, so the same kernel, in a sixth of the time
    layer = layer_of(*shape, bias=rows % 2 == 0, dtype=dtype)
    x = torch.randn(rows, shape[0], generator=torch.Generator().manual_seed(rows)).to(dtype)
    words, parts = packed(layer, device)
    bias = None if layer.bias is None else layer.bias.to(device)
    weights = exact_weights(layer)
    wanted = x.double() @ weights + (0 if layer.bias is None else layer.bias.double())
    size = x.double().abs() @ weights.abs()
    rounding = 2**-11 if dtype == torch.float16 else 2**-8
    fast = cuda.awq_multiply(x.to(device), *parts, bias, layer.group)
    naive = cuda.awq_multiply(x.to(device), words, *parts[1:], bias, layer.group, cuda.NAIVE)
    for product in (fast, naive):
        assert product.dtype == dtype
        error = (product.cpu().double() - wanted).abs()
        assert bool((error <= rounding * wanted.abs() * 1.01 + 2e-6 * size + 1e-7).all())
    again = cuda.awq_multiply(x.to(device), *parts, bias, layer.group)
    assert torch.equal(fast, again)


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_layer_on_a_gpu(chosen, device, rows, dtype):
    layer = layer_of(256, 96, 128, True, dtype)
    wanted_state = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(2, rows, 256, generator=torch.Generator().manual_seed(rows)).to(dtype)
    wanted = x.double() @ exact_weights(layer) + layer.bias.double()
    before = awq.fallbacks()
    layer = layer.to(device)
    with torch.no_grad():
        out = layer(x.to(device))
    assert out.shape == (2, rows, 96) and awq.fallbacks() == before
    bound = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype] * float(wanted.abs().max())
    assert float((out.cpu().double() - wanted).abs().max()) <= bound
    for name, value in layer.state_dict().items():
        assert torch.equal(value.cpu(), wanted_state[name]), name


def test_what_the_kernels_do_not_take_is_counted(chosen, device):
    with torch.no_grad():
        for group, dtype, reason in ((16, torch.float16, "shape"), (64, torch.float32, "dtype")):
            layer = layer_of(64, 48, group, dtype=dtype)
            x = torch.randn(3, 64).to(dtype)
            before = awq.fallbacks().get(reason, 0)
            out = layer.to(device)(x.to(device))
            assert awq.fallbacks()[reason] == before + 1
            assert float((out.cpu().double() - x.double() @ exact_weights(layer.cpu())).abs().max()) < 0.05


@pytest.mark.parametrize("change", [{"group": 48}, {"dtype": 0}, {"outputs": 24}, {"rows": 65}])
def test_what_does_not_fit_is_refused(device, change):
    layer = layer_of(192, 48, 64)
    x = torch.zeros(change.get("rows", 1), 192, dtype=torch.float16, device=device)
    args = cuda._awq(
        192, change.get("outputs", 48), change.get("group", 64), torch.float16, 0, x.shape[0],
        words=layer.qweight.to(device), zeros=layer.qzeros.to(device), scales=layer.scales.to(device), x=x,
        out=torch.empty(65, 48, dtype=torch.float16, device=device), x_row_stride=384, out_row_stride=96,
    )  # fmt: skip
    args.dtype = change.get("dtype", args.dtype)
    with pytest.raises(contract.Unsupported):
        cuda.run("kvk_awq_multiply", args, x)


class Watched:
    """A lock that says when a second thread waits for it."""

    def __init__(self):
        self._lock, self._users, self.wanted = threading.Lock(), 0, threading.Event()

    def __enter__(self):
        self._users += 1
        if self._users > 1:
            self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_two_first_calls_at_once_reorder_the_words_once(chosen, device, monkeypatch):
    """Twice would be other weights, for good."""
    layer, lock, repack, calls = layer_of(128, 16, 64), Watched(), cuda.awq_repack, []
    x = torch.randn(3, 128).to(torch.float16)
    wanted = (x.double() @ exact_weights(layer)).float()
    layer, x = layer.to(device), x.to(device)

    def first(*args):
        calls.append(args)
        if len(calls) == 1:
            other.start()
            assert lock.wanted.wait(60)
        return repack(*args)

    def call(out):
        with torch.no_grad():
            out.append(layer(x))

    outs = []
    other = threading.Thread(target=call, args=(outs,))
    monkeypatch.setattr(linear, "_reordering", lock)
    monkeypatch.setattr(cuda, "awq_repack", first)
    call(outs)
    other.join()
    assert len(calls) == 1
    for out in outs:
        assert torch.allclose(out.float().cpu(), wanted, rtol=1e-2, atol=1e-2)


def test_two_first_calls_in_one_compiled_graph_reorder_the_words_once(chosen, device, monkeypatch):
    """Both may be in it before either has noted on the layer that it is done."""
    layer, lock, calls = layer_of(128, 16, 64), Watched(), []
    x = torch.randn(3, 128).to(torch.float16)
    wanted = (x.double() @ exact_weights(layer)).float()
    layer, x, outs = layer.to(device), x.to(device), []
    compiled = torch.compile(layer, backend="eager")
    run = cuda.run

    def counted(name, *args):
        calls.append(name)
        if calls.count("kvk_awq_repack") == 1 and name == "kvk_awq_repack":
            other.start()
            assert lock.wanted.wait(60)
        return run(name, *args)

    def call():
        with torch.no_grad():
            outs.append(compiled(x))

    other = threading.Thread(target=call)
    monkeypatch.setattr(linear, "_reordering", lock)
    monkeypatch.setattr(cuda, "run", counted)
    call()
    other.join()
    call()
    assert calls.count("kvk_awq_repack") == 1 and len(outs) == 3
    for out in outs:
        assert torch.allclose(out.float().cpu(), wanted, rtol=1e-2, atol=1e-2)


def test_a_state_taken_before_the_first_call_stays_the_checkpoints(chosen, device):
    layer = layer_of(128, 16, 64).to(device)
    state, words = layer.state_dict(), layer.qweight.clone()
    with torch.no_grad():
        layer(torch.randn(3, 128, device=device).to(torch.float16))
    assert not torch.equal(layer.qweight, words)
    assert torch.equal(state["qweight"], words)


def test_a_first_call_is_not_recorded_in_a_graph(chosen, device, monkeypatch):
    """A replay would reorder the words again."""
    layer, x = layer_of(128, 16, 64).to(device), torch.randn(3, 128, device=device).to(torch.float16)
    monkeypatch.setattr(linear, "_capturing", lambda device: True)
    with torch.no_grad(), pytest.raises(InvalidArgument, match="call the model once before the capture"):
        layer(x)


@pytest.mark.parametrize("rows", [3, 70])
def test_a_bias_of_another_type(chosen, device, rows):
    layer = layer_of(128, 16, 64, bias=True, dtype=torch.float32).to(device)
    with torch.no_grad():
        assert layer(torch.randn(rows, 128, device=device).to(torch.float16)).dtype == torch.float16
