"""Proves that a model whose layers native/cpu computes is torch's again for whoever looks into it, transforms
it or changes it: modes, transforms of torch.func, derivatives, hooks of all modules, patched classes and
functions, parts and numbers put in afterwards; and that no size is read which is not there.

Method: what a hostile reader found by reading, each beside the same module or model without the kernels.
"""

import copy

import pytest
import torch
import transformers
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from kvclient.hf import layers
from kvclient.hf.layers import forwards
from tests.hf.zoo import build, prompt

SIZES = {"layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def off(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


def llama(**changed):
    """(with the kernels, without)."""
    model = build("llama", **(SIZES | changed))
    plain = copy.deepcopy(model)
    assert layers.install(model)
    return model, plain


def linear(inputs=64, outputs=32, bias=True):
    module = torch.nn.Linear(inputs, outputs, bias=bias)
    plain = copy.deepcopy(module)
    assert layers.install(torch.nn.Sequential(module)) == 1
    return module, plain


@torch.no_grad()
def test_vmap_and_forward_derivatives_are_torchs():
    module, plain = linear()
    x, tangent = torch.randn(3, 4, 64), torch.randn(3, 4, 64)
    assert off(vmap(module)(x), plain(x)) < 1e-5
    many = {"weight": torch.randn(5, 32, 64), "bias": torch.randn(5, 32)}
    found = vmap(lambda held: functional_call(module, held, (x[0],)))(many)
    assert off(found, vmap(lambda held: functional_call(plain, held, (x[0],)))(many)) < 1e-5
    for each, wanted in zip(jvp(module, (x,), (tangent,)), jvp(plain, (x,), (tangent,)), strict=True):
        assert off(each, wanted) < 1e-5
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(module(forward_ad.make_dual(x, tangent))).tangent
    assert out is not None, "the derivative was lost on the way"
    assert off(out, functional.linear(tangent, plain.weight)) < 1e-5


@torch.no_grad()
def test_who_watches_operators_sees_all_of_them():
    model, plain = llama()
    counted = []
    for each in (model, plain):
        with FlopCounterMode(display=False) as mode:
            each(input_ids=prompt(12))
        counted.append(mode.get_total_flops())
    assert counted[0] == counted[1] > 0
    module, simple = linear()
    traced = make_fx(module)(torch.randn(2, 64))
    x = torch.randn(2, 64)
    assert off(traced(x), simple(x)) < 1e-5
    seen = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Sees():
        module(x)
    assert functional.linear in seen or torch._C._nn.linear in seen


@torch.no_grad()
def test_a_compiled_model_is_torchs():
    """Of each kind of module that the kernels compute, those of a layer."""
    model, wanted = llama(layers=1)
    ids = prompt(12)
    model.model.layers[0].compile(backend="eager")
    assert off(logits(model, ids), logits(wanted, ids)) < 1e-4


def test_hooks_of_all_modules_see_every_module():
    model, plain = llama()
    seen = []
    for each in (model, plain):
        names = []
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, out, names=names: names.append((type(module).__name__, out))
        )
        try:
            logits(each, prompt(12))
        finally:
            handle.remove()
        seen.append(names)
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    for (name, found), (_, wanted) in zip(*seen, strict=True):
        if isinstance(found, torch.Tensor):
            assert off(found, wanted) < 1e-4, f"what a hook kept of {name} was changed afterwards"


@pytest.mark.parametrize("what", ["class", "function", "rope", "kind"])
def test_what_is_patched_afterwards_counts(monkeypatch, what):
    model, plain = llama()
    modelling = transformers.models.llama.modeling_llama
    if what == "class":
        usual = modelling.LlamaMLP.forward
        monkeypatch.setattr(modelling.LlamaMLP, "forward", lambda self, x: 3 * usual(self, x))
    elif what == "function":
        product = functional.linear
        monkeypatch.setattr(functional, "linear", lambda x, w, b=None: product(x, w.round(decimals=2), b))
    elif what == "rope":
        monkeypatch.setattr(modelling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    else:

        class Doubled(torch.nn.Linear):
            def forward(self, input):
                return 2 * functional.linear(input, self.weight)

        for each in (model, plain):
            each.model.layers[1].mlp.down_proj.__class__ = Doubled
    ids = prompt(20)
    assert off(logits(model, ids), logits(plain, ids)) < 1e-4


def test_another_activation_epsilon_or_hook_counts():
    model, plain = llama()
    ids = prompt(20)
    for each in (model, plain):
        each.model.layers[0].mlp.act_fn = torch.nn.GELU()
        each.model.norm.variance_epsilon = 0.5
    assert off(logits(model, ids), logits(plain, ids)) < 1e-4
    seen = []
    handle = model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: seen.append(1))
    logits(model, ids)
    assert seen
    handle.remove()
    for each in (model, plain):
        each.model.layers[1].mlp.act_fn.forward = torch.zeros_like
    assert off(logits(model, ids), logits(plain, ids)) < 1e-4


@torch.no_grad()
def test_sizes_that_are_not_there_are_not_read():
    """One number for all outputs, as F.linear takes it; halves of an MLP that do not fit each other."""
    module, plain = linear()
    x = torch.randn(3, 64)
    for each in (module, plain):
        each.bias = torch.nn.Parameter(torch.full((1,), 7.0))
    assert off(module(x), plain(x)) < 1e-5
    narrow = torch.nn.Parameter(torch.randn(32, 24))
    for each in (module, plain):
        each.weight = narrow
    assert off(module(x[:, :24].contiguous()), plain(x[:, :24])) < 1e-5
    model, _ = llama()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight[:8].clone())
    with pytest.raises(RuntimeError, match="size"):
        logits(model, prompt(8))
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(torch.randn(3, 64))
    assert off(norm(x), norm.weight * (x * torch.rsqrt(x.square().mean(-1, True) + 1e-6))) < 1e-4


class OddRMSNorm(torch.nn.Module):
    def __init__(self, form, twice=False):
        super().__init__()
        self.weight, self.eps, self.form = torch.nn.Parameter(torch.rand(32)), 1e-6, form
        self.twice = twice

    def forward(self, x):
        squares = x.square().mean(-1, keepdim=True)
        over = {
            "usual": lambda: torch.rsqrt(squares + self.eps),
            "clamped": lambda: torch.rsqrt(squares.clamp(min=self.eps)),
            "outside": lambda: 1 / (squares.sqrt() + self.eps),
            "bounded": lambda: torch.rsqrt(squares.clamp(max=100) + self.eps),
        }[self.form]()
        return (2 if self.twice else 1) * self.weight * (x * over)


@pytest.mark.parametrize("form", ["clamped", "outside", "bounded"])
@torch.no_grad()
def test_where_epsilon_stands_is_found_out(form):
    """Of numbers near one, all these are one norm to seven digits."""
    module = OddRMSNorm(form)
    layers.install(torch.nn.Sequential(module))
    for size in (1e-4, 1.0, 100.0):
        x = size * torch.randn(4, 32)
        assert off(module(x), OddRMSNorm.forward(module, x)) < 1e-5


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False), lambda: torch.autocast("cpu"),
        forward_ad.dual_level,
    ],
    ids=["device", "operators", "autocast", "derivatives"],
)  # fmt: skip
@torch.no_grad()
def test_under_a_mode_nothing_is_installed_that_was_not_tried(mode):
    """Both sides of a trial were the class's own then, and so always the same."""
    module = OddRMSNorm("clamped")
    with mode():
        layers.install(torch.nn.Sequential(module))
    x = 1e-4 * torch.randn(4, 32)
    assert off(module(x), OddRMSNorm.forward(module, x)) < 1e-5


@torch.no_grad()
def test_one_modules_proof_is_no_others():
    model = torch.nn.Sequential(OddRMSNorm("usual"), OddRMSNorm("usual", twice=True))
    assert layers.install(model) == 1
    x = torch.randn(4, 32)
    assert off(model(x), OddRMSNorm.forward(model[1], OddRMSNorm.forward(model[0], x))) < 1e-5


@torch.no_grad()
def test_angles_that_are_views_or_learned():
    model, plain = llama()
    hidden = torch.randn(1, 5, 64)
    turned = torch.randn(1, 5, 32, dtype=torch.complex64)
    cos, sin = turned.real.contiguous(), turned.conj().imag.contiguous()
    assert turned.conj().imag.is_neg()
    attention, wanted = model.model.layers[0].self_attn, plain.model.layers[0].self_attn
    for angles in ((cos, sin), (cos, torch.empty_like(cos).copy_(sin)), (turned.real, turned.conj().imag)):
        assert off(attention(hidden, angles, None)[0], wanted(hidden, angles, None)[0]) < 1e-4
    learned = cos.clone().requires_grad_()
    model.requires_grad_(False)
    with torch.enable_grad():
        attention(hidden, (learned, sin), None)[0].sum().backward()
    assert learned.grad is not None and learned.grad.any()


@torch.no_grad()
def test_a_default_device_or_type_changes_nothing():
    model = build("llama", **SIZES)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        count = layers.install(copy.deepcopy(model))
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"):
        assert layers.install(copy.deepcopy(model)) == count == layers.install(model)


class Plain(torch.nn.Module):
    """A model's answer, without what a compiler needs no graph for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def test_an_installed_model_compiles_in_one_graph_and_is_exported():
    model, plain = llama(layers=1)
    ids = prompt(12)
    compiled = torch.compile(Plain(model), fullgraph=True, backend="eager")
    assert off(compiled(ids), logits(plain, ids)) < 1e-4
    module, simple = linear()
    x = torch.randn(2, 64)
    norm, rows = model.model.norm, torch.randn(1, 3, 64)
    for strict in (False, True):
        assert off(torch.export.export(module, (x,), strict=strict).module()(x), simple(x)) < 1e-5
        exported = torch.export.export(norm, (rows,), strict=strict).module()
        assert off(exported(rows), plain.model.norm(rows)) < 1e-5


def test_is_watched_says_no_by_itself():
    assert not forwards.is_watched()
