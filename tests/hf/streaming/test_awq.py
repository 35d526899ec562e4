"""Proves that AWQ "gemm" checkpoints load straight from safetensors and compute what their words stand for.

Method: a packer written from the format makes small checkpoints of tiny random models (of SmolLM2:
tests/hf/streaming/test_awq_smollm2.py); the model that holds the dequantised weights in ordinary linear
layers is the oracle. The order of nibbles is checked against the published one; every wrong checkpoint is
refused with what is wrong about it.
"""

import json

import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.hf import awq
from kvclient.hf.awq import head, linear
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.zoo import build, generate, near, prompt

GROUP = 16


def test_a_word_holds_its_columns_in_the_published_order():
    codes = torch.arange(8, dtype=torch.uint8)[None]
    word = int(awq.pack(codes)[0, 0]) & 0xFFFFFFFF
    assert [word >> 4 * i & 15 for i in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(awq.unpack(awq.pack(codes)), codes)


def test_packing_round_trips():
    codes = torch.randint(0, 16, (33, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(awq.unpack(awq.pack(codes)), codes)


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_its_weights(rows, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(72, 64, generator=generator)
    layer = awq.AwqLinear(64, 72, GROUP, True, dtype)
    layer.qweight, layer.qzeros, layer.scales = awq.quantise(weight, GROUP)
    layer.bias.data = torch.randn(72, generator=generator).to(dtype)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    codes = awq.unpack(layer.qweight).double() - awq.unpack(layer.qzeros).double().repeat_interleave(GROUP, 0)
    exact = codes * layer.scales.double().repeat_interleave(GROUP, 0)
    assert float((exact.t() - weight).abs().max()) <= float(layer.scales.max()) * 0.51
    wanted = x.double() @ exact + layer.bias.double()
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype] * float(wanted.abs().max())
    assert float((layer(x).double() - wanted).abs().max()) <= bound
    monkeypatch.setattr(linear, "STRIPE_BYTES", 4 * 64 * 24)  # three stripes
    assert float((layer(x).double() - wanted).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [3, 65])
def test_what_comes_out_has_the_type_of_what_went_in(dtype, rows):
    """Whatever type the bias has, as from a checkpoint whose other tensors are fp32."""
    layer = awq.AwqLinear(64, 24, GROUP, True, torch.float32)
    assert layer(torch.randn(rows, 64).to(dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(rows, 64)).dtype == torch.bfloat16


def test_whole_numbers_are_no_input():
    """The weights, taken as whole numbers too, would nearly all be 0."""
    with pytest.raises(InvalidArgument, match=r"x is torch\.int64"):
        awq.AwqLinear(64, 24, GROUP, True, torch.float32)(torch.ones(3, 64, dtype=torch.int64))


@pytest.mark.parametrize(
    ("value", "said"), [(1.5e6, "100000"), (-1.5e6, "100000"), (float("inf"), "inf"), (float("nan"), "nan")]
)
def test_weights_that_fp16_scales_cannot_hold_are_refused(value, said):
    weight = torch.zeros(24, 64)
    weight[3, 40] = value
    with pytest.raises(InvalidArgument, match=f"a scale of {said}; fp16 holds 65504 at most"):
        awq.quantise(weight, GROUP)


def test_the_largest_weights_that_fp16_scales_hold():
    weight = torch.full((8, 16), 65504.0 * 15)
    words, zeros, scales = awq.quantise(weight, GROUP)
    assert torch.equal(awq.unpack(words).t() * scales.t().double(), weight.double())
    assert not zeros.any()


@pytest.mark.parametrize(("outputs", "group"), [(24, 0), (24, 48), (20, 16)])
def test_shapes_without_words_are_not_quantised(outputs, group):
    with pytest.raises(InvalidArgument, match=f"fits no groups of {group}"):
        awq.quantise(torch.randn(outputs, 64), group)


def test_the_kernels_order_is_a_permutation_of_nibbles():
    """Input 64a + 16t + 4s + 2h + e, output 16b + 8i + g: word [b, a, lane 4g + t, s], nibble 4e + 2h + i."""
    codes = torch.randint(0, 16, (128, 48), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    lanes = awq.to_lanes(awq.pack(codes)).reshape(3, 2, 32, 4)
    for k, n in ((0, 0), (1, 0), (2, 9), (66, 17), (127, 47), (85, 30)):
        a, t, s, h, e = k // 64, k // 16 % 4, k // 4 % 4, k // 2 % 2, k % 2
        b, i, g = n // 16, n // 8 % 2, n % 8
        assert int(lanes[b, a, 4 * g + t, s]) >> 4 * (4 * e + 2 * h + i) & 15 == int(codes[k, n])
    assert torch.equal(awq.from_lanes(lanes.reshape(128, 6)), awq.pack(codes))


def test_a_layer_in_the_kernels_order_has_the_checkpoints_state():
    """A GPU's first call reorders the words in place: saved, moved back and loaded they are as they were."""
    layer = awq.AwqLinear(64, 32, 64, False, torch.float32)
    layer.qweight, layer.qzeros, layer.scales = awq.quantise(torch.randn(32, 64), 64)
    words, x = layer.qweight.clone(), torch.randn(3, 64)
    wanted = layer(x)
    layer.qweight.copy_(awq.to_lanes(layer.qweight))
    layer._in_lanes = True
    assert not torch.equal(layer.qweight, words)
    assert torch.equal(layer.state_dict()["qweight"], words)
    assert near(layer(x), wanted), "torch answers for the kernels, which read the checkpoint's order"
    held, state = layer.qweight, layer.state_dict()
    held.zero_()
    layer.load_state_dict(state)
    assert layer.qweight is held and torch.equal(held, awq.to_lanes(words)), "a captured graph reads it there"
    assert near(layer(x), wanted)
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer.qweight, words) and torch.equal(layer(x), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_a_model_computes_in_changes_no_weight(dtype):
    """model.to(torch.bfloat16) would round the scales, and the kernels read them as fp16."""
    layer = awq.AwqLinear(64, 32, GROUP, True, torch.float16)
    layer.qweight, layer.qzeros, layer.scales = awq.quantise(torch.randn(32, 64), GROUP)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    model = torch.nn.Sequential(layer).to(dtype)
    assert model[0].bias.dtype == dtype and model[0](torch.randn(3, 64).to(dtype)).dtype == dtype
    for name in ("qweight", "qzeros", "scales"):
        value = layer.state_dict()[name]
        assert value.dtype == before[name].dtype and torch.equal(value, before[name])
    assert layer.to("meta").scales.dtype == torch.float16


def test_operators_have_shapes_without_a_gpu():
    words, scales = torch.empty(128, 4, dtype=torch.int32, device="meta"), torch.empty(1, 32, device="meta")
    zeros = torch.empty(1, 4, dtype=torch.int32, device="meta")
    x = torch.empty(3, 128, dtype=torch.float16, device="meta")
    assert torch.ops.kvclient.awq_multiply(x, words, zeros, scales, None, 128).shape == (3, 32)
    weights = torch.ops.kvclient.awq_dequantise(words, zeros, scales, 128, torch.bfloat16)
    assert weights.shape == (32, 128) and weights.dtype == torch.bfloat16
    assert torch.ops.kvclient.awq_repack(words, 128).shape == words.shape


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "gemma"])
def test_a_checkpoint_says_what_its_weights_say(name, tmp_path):
    model = build(name)
    if model is None:
        pytest.skip(f"this transformers has no {name}")
    home, ids = write_checkpoint(tmp_path, model, GROUP), prompt(40)
    loaded = awq.from_pretrained(home)
    packed = [module for module in loaded.modules() if isinstance(module, awq.AwqLinear)]
    assert len(packed) >= 3 * 4
    tokens, logits, _ = generate(model, ids)
    found, values, _ = generate(loaded, ids)
    assert torch.equal(found, tokens)
    assert float((values - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


def test_a_saved_model_is_such_a_checkpoint_again(tmp_path):
    """Without its quantisation in the configuration it would be one whose weights are missing."""
    (tmp_path / "one").mkdir()
    loaded = awq.from_pretrained(write_checkpoint(tmp_path / "one", build("llama"), GROUP))
    loaded.save_pretrained(tmp_path / "two")
    again = awq.from_pretrained(tmp_path / "two")
    assert again.state_dict().keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8])
def test_a_type_to_compute_in_that_is_none_is_refused(dtype, tmp_path):
    home = write_checkpoint(tmp_path, build("llama"), GROUP)
    with pytest.raises(InvalidArgument, match=r"must be a floating point torch\.dtype"):
        awq.from_pretrained(home, dtype=dtype)


def change_part(tensors, part, change):
    name = f"model.layers.0.self_attn.q_proj.{part}"
    tensors[name] = change(tensors[name]).contiguous()


@pytest.mark.parametrize(
    ("quantisation", "change", "words"),
    [
        ({"version": "gemv"}, None, "version='gemv'"),
        ({"bits": 8}, None, "bits=8"),
        ({"quant_method": "gptq"}, None, "gptq"),
        ({"group_size": -1}, None, "group_size=-1"),
        ({}, lambda t: t.pop("model.layers.0.self_attn.q_proj.scales"), "q_proj.scales is missing"),
        ({}, lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        ({}, lambda t: t.update({"model.stray": torch.zeros(1)}), "model.stray"),
        ({}, lambda t: change_part(t, "scales", lambda part: part / 0), "q_proj.scales has inf"),
        ({}, lambda t: change_part(t, "scales", lambda part: part * torch.nan), "q_proj.scales has nan"),
        (
            {},
            lambda t: t.update({"model.ghost.qweight": torch.zeros(1, 1)}),
            "model.ghost, which the model has not",
        ),
        ({}, lambda t: t.update({"model.norm.qweight": torch.zeros(1, 1)}), "model.norm, a LlamaRMSNorm"),
        ({}, lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight is .*\[3\]"),
        ({}, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].int()}), "is torch.int32"),
        ({}, lambda t: change_part(t, "scales", torch.Tensor.float), "scales is torch.float32"),
        ({}, lambda t: change_part(t, "qzeros", lambda part: part[:-1]), "qzeros is torch.int32"),
        ({}, lambda t: change_part(t, "qweight", torch.Tensor.long), "qweight is torch.int64"),
        ({"group_size": 48}, None, "fits no groups of 48"),
    ],
)
def test_what_is_wrong_is_refused(quantisation, change, words, tmp_path):
    home = write_checkpoint(tmp_path, build("llama"), GROUP, quantisation, change)
    with pytest.raises(InvalidArgument, match=words):
        awq.from_pretrained(home)


def test_tied_embeddings_that_the_checkpoint_has_under_no_name_are_missing(tmp_path):
    model = build("gemma")
    assert model.config.tie_word_embeddings
    write_checkpoint(tmp_path, model, GROUP, change=lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(InvalidArgument, match="embed_tokens"):
        awq.from_pretrained(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    home = write_checkpoint(tmp_path, build("llama"), GROUP)
    (home / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../model.safetensors"}})
    )
    with pytest.raises(InvalidArgument, match="outside"):
        awq.from_pretrained(home)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_refused(text, tmp_path):
    home = write_checkpoint(tmp_path, build("llama"), GROUP)
    (home / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidArgument, match="no index of a checkpoint"):
        awq.from_pretrained(home)


def test_files_that_are_missing_or_cut_short_are_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        awq.from_pretrained(tmp_path / "nowhere")
    home = write_checkpoint(tmp_path, build("llama"), GROUP)
    weights = home / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidArgument, match=r"model\.safetensors cannot be read"):
        awq.from_pretrained(home)
    weights.unlink()
    with pytest.raises(InvalidArgument, match=r"model\.safetensors cannot be read"):
        awq.from_pretrained(home)


@pytest.mark.parametrize(
    ("inputs", "outputs", "group"), [(64, 20, 16), (60, 64, 16), (64, 64, 0), (64, 64, -1)]
)
def test_a_layer_of_odd_shape_is_refused(inputs, outputs, group):
    with pytest.raises(InvalidArgument, match="fits no groups"):
        awq.AwqLinear(inputs, outputs, group, False, torch.float32)


def test_few_rows_on_a_cpu_dequantise_nothing(monkeypatch):
    """Decoding a token reads the packed words once, where they lie."""
    layer = awq.AwqLinear(64, 24, GROUP, True, torch.bfloat16)
    layer.qweight, layer.qzeros, layer.scales = awq.quantise(torch.randn(24, 64), GROUP)
    x = torch.randn(2, 16, 64)
    whole = layer(x)
    with monkeypatch.context() as patched:
        patched.setattr(awq.AwqLinear, "weights", None)
        assert torch.equal(layer(x)[1, 7], layer(x[1, 7])), "a row has other bits beside other rows"
        few = layer(x[:, :1].bfloat16()).float() - layer(x[:, :1].bfloat16().float())
        assert few.abs().max() <= 2**-8 * whole.abs().max(), "bf16 is further off than its own rounding"
        many = torch.cat([x, *(x + i for i in range(8))], 1)  # of bf16 more rows than packed words are for
        assert torch.equal(layer(many)[:, :16], whole)
        patched.setattr(linear, "torch_multiplies_bf16", lambda: True)
        for tile in (linear.TILE_BYTES, 8 * 2 * 64):  # of eight columns
            patched.setattr(linear, "TILE_BYTES", tile)
            near = layer(many.bfloat16())[:, :16].float()
            assert near.shape == whole.shape and (near - whole).abs().max() <= 2e-2 * whole.abs().max()
        patched.setattr(linear, "torch_multiplies_bf16", lambda: False)  # it would add up number by number
        patched.setattr(awq.AwqLinear, "_by_tiles", None)
        many = many.bfloat16()
        assert torch.equal(layer(many)[:, :1], layer(many[:, :1]))
    monkeypatch.setenv(linear.ENVIRONMENT, "torch")
    assert (layer(x) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_a_checkpoint_without_zero_points_has_eight_for_all(tmp_path):
    model, ids = build("llama"), prompt(9)
    write_checkpoint(tmp_path, model, GROUP, None, eights)
    wanted = awq.from_pretrained(tmp_path)(ids).logits
    without = {"zero_point": False}
    write_checkpoint(tmp_path, build("llama"), GROUP, without, lambda t: [t.pop(k) for k in zeros_of(t)])
    assert torch.equal(awq.from_pretrained(tmp_path)(ids).logits, wanted)


def zeros_of(tensors):
    return [name for name in tensors if name.endswith(".qzeros")]


def eights(tensors):
    for name in zeros_of(tensors):
        tensors[name] = awq.pack(torch.full((tensors[name].shape[0], 8 * tensors[name].shape[1]), 8))


# ---------------------------------------------------------------- the head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_meet_the_head_as_it_lies(dtype, bias, monkeypatch):
    torch.manual_seed(4)
    stock = torch.nn.Linear(72, 300, bias).to(dtype)
    layer = head.Head(72, 300, bias, dtype=dtype)
    layer.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 72).to(dtype)
    with torch.inference_mode():
        exact = x.double() @ stock.weight.double().t() + (stock.bias.double() if bias else 0)
        assert torch.equal(layer(x), stock(x)), "of many rows it is torch's"
        monkeypatch.setattr(torch.nn.functional, "linear", None)
        for few in (x[:1, :1], x[:, 0], x[:, :4], x[0, 0]):
            assert layer(few).shape == (*few.shape[:-1], 300) and layer(few).dtype == dtype
        found = torch.stack([layer(row) for row in x.flatten(0, 1)]).view(2, 5, 300)
        assert torch.equal(layer(x[:, :4]), found[:, :4]), "a row has other bits beside other rows"
        off = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        assert ((found - exact).abs() <= off * exact.abs() + 1e-5).all()
        part = head.multiply(x[:, 0], layer.weight[100:207], layer.bias[100:207] if bias else None)
        assert torch.equal(part, found[:, 0, 100:207]), "a piece has other bits than the whole"


def test_what_the_heads_kernel_does_not_take_is_torchs():
    layer = head.Head(64, 40, dtype=torch.bfloat16)
    x = torch.randn(1, 64).bfloat16()
    assert layer(x).requires_grad, "the weights do"
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.float16
    wide = layer.float()
    with torch.inference_mode():
        assert torch.equal(wide(x.float()), torch.nn.functional.linear(x.float(), wide.weight, wide.bias))


def test_a_packed_models_head_is_such_a_one_and_a_tied_one_stays_tied(tmp_path):
    for name, tied in (("llama", False), ("gemma", True)):
        write_checkpoint(tmp_path, build(name), GROUP)
        assert type(awq.from_pretrained(tmp_path).get_output_embeddings()) is torch.nn.Linear, "fp32"
        model = awq.from_pretrained(tmp_path, torch.bfloat16)
        assert type(model.get_output_embeddings()) is head.Head
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "bias"])
def test_weights_of_another_shape_are_never_read(name):
    """The kernels read by addresses: what a user put in their place is looked at before."""
    layer, x = awq.AwqLinear(64, 64, 32, True, torch.float32), torch.randn(1, 64)
    held = getattr(layer, name).data
    changed = [held[..., :4].clone()]
    if name != "bias":  # which is made one of fp32
        changed += [held.double(), held.t().contiguous().t()]
    for wrong in changed:
        places = layer._parameters if name == "bias" else layer._buffers
        places[name] = torch.nn.Parameter(wrong) if name == "bias" else wrong
        with torch.inference_mode(), pytest.raises(InvalidArgument, match=f"{name} is torch"):
            layer(x)


def test_words_in_panels_stay_so_in_an_export():
    """torch.export traces other tensors in the place of the layer's, which have their shape and no more."""
    layer, x = awq.AwqLinear(192, 136, 64, False, torch.float32), torch.randn(2, 192)
    layer.qweight.random_(-(2**31), 2**31 - 1)
    layer.scales.fill_(2**-6)
    wanted = layer(x)
    layer.into_panels()
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), wanted)
