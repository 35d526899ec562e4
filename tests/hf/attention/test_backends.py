"""Proves that the kernels can stand in for a stock model's attention: install() and uninstall(), no store.

Method: tiny random models of every architecture, the same prompts with the model's own attention (sdpa or
eager) and with each backend: equal greedy tokens and nearly equal logits in fp32, the prompt's logits within
rounding in bf16 (later ones may follow another token); padded rows; whatever the kernels do not take is
answered by torch, rightly, and counted by its reason.
"""

import re
import threading

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.attention import backends, dense, registered, sdpa, switch, torch_reference
from kvclient.kernels import contract
from tests.hf.zoo import SERVED, generate, known, prompt
from tests.kernels.cpu_paths import provide

OWN_ATTENTION = ("falcon", "falcon_alibi", "bloom", "mpt")  # these call no registered function
OTHERS = ("deepseek_v3", "qwen3_next", "llama_dynamic")
OLDER = ("mistral_sliding", "gemma2", "gemma3", "cohere2", "llama4", "gpt_oss")  # of those with windows
NAMES = [name for name in (*SERVED, *OLDER, *OTHERS) if name not in OWN_ATTENTION]
# In transformers 5.0 these made their masks by themselves, which only torch reads.
MASKS_OF_THEIR_OWN = ("llama4",)  # attends in chunks
if transformers.__version__.startswith("5.0."):
    MASKS_OF_THEIR_OWN += ("opt", "stablelm")
BACKENDS = ["cpu_avx512", "cpu_amx", "cpu_avx2", "cpu_reference", "torch"]
TELLING = (
    "llama",
    "gemma2",
    "gpt_oss",
    "gpt2",
    "mistral_sliding",
)  # softcap, sinks, windows; the rest is slow
PAIRS = [
    pytest.param(name, backend, marks=[] if backend == BACKENDS[0] or name in TELLING else pytest.mark.slow)
    for name in NAMES
    for backend in BACKENDS
]


def runnable(backend: str) -> str:
    if reason := attention.available_backends()[backend]:
        pytest.skip(f"{backend}: {reason}")
    return backend


@pytest.fixture(autouse=True)
def counts():
    """Calls that torch answered during the test, by reason."""
    before = attention.fallbacks()

    def new() -> dict[str, int]:
        now = attention.fallbacks()
        return {
            reason: now[reason] - before.get(reason, 0)
            for reason in now
            if now[reason] != before.get(reason, 0)
        }

    return new


@pytest.fixture(autouse=True)
def emulated(request, monkeypatch):
    """AMX by emulation where this CPU has none."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("backend") == "cpu_amx":
        provide("amx", monkeypatch)


def padded_rows():
    ids = torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :21] = mask[1, :21] = 0
    return ids, mask


@pytest.mark.matrix(2, *TELLING, "llama4", "qwen3_next")
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_equals_the_models_own_attention(name, backend, counts):
    model, ids = known(name), prompt(61)
    rows, mask = padded_rows()
    plain, logits, _ = generate(model, ids)
    plain_rows, row_logits, _ = generate(model, rows, attention_mask=mask)
    assert attention.install(model, runnable(backend)) == backend
    assert attention.installed(model) == backend
    for wanted, values, (tokens, found, _) in (
        (plain, logits, generate(model, ids)),
        (plain_rows, row_logits, generate(model, rows, attention_mask=mask)),
    ):
        assert torch.equal(tokens, wanted)
        assert float((found - values).abs().max()) <= 1e-5 * float(values.abs().max())
    assert set(counts()) <= ({"mask"} if name in MASKS_OF_THEIR_OWN else set())
    attention.uninstall(model)
    assert torch.equal(generate(model, ids)[1], logits)


@pytest.mark.matrix(0, *TELLING)
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_in_bfloat16_to_rounding(name, backend):
    model, (rows, mask) = known(name, torch.bfloat16), padded_rows()
    _, wanted, _ = generate(model, rows, 1, attention_mask=mask)
    attention.install(model, runnable(backend))
    _, found, _ = generate(model, rows, 1, attention_mask=mask)
    assert float((found - wanted).abs().max()) <= 5e-2 * float(wanted.abs().max())


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_with_its_own_attention_is_refused(name):
    model = known(name)
    with pytest.raises(InvalidArgument, match="its own attention"):
        attention.install(model)
    assert switch.PLACE not in model.__dict__


def test_every_backend_is_named_with_its_reason():
    found = attention.available_backends()
    assert list(found) == [
        "cuda_sm90a", "cuda", "triton", "torch_cudnn", "torch_flash",
        "cpu_amx", "cpu_avx512", "cpu_avx2", "cpu_reference", "torch",
    ]  # fmt: skip
    assert found["torch"] is None
    assert all(reason is None or reason for reason in found.values())
    for name, reason in found.items():
        if reason is not None:
            with pytest.raises(InvalidArgument, match=name):
                backends.backend(name)
    with pytest.raises(InvalidArgument, match="abacus"):
        backends.backend("abacus")


def test_the_best_that_fits_is_chosen(monkeypatch):
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    cpu = torch.device("cpu")
    best = next(name for name, reason in attention.available_backends().items() if reason is None)
    assert backends.choose(cpu, torch.bfloat16, 64).name == best
    assert backends.choose(cpu, torch.float64, 64).name == "torch"
    assert backends.choose(cpu, torch.bfloat16, 1024).name == "torch"
    assert backends.choose(torch.device("meta"), torch.bfloat16, 64).name == "torch"
    monkeypatch.setenv(backends.ENVIRONMENT, "torch")
    assert backends.choose(cpu, torch.bfloat16, 64).name == "torch"
    monkeypatch.setenv(backends.ENVIRONMENT, "cuda")
    with pytest.raises(InvalidArgument, match="cuda cannot run here"):
        backends.choose(cpu, torch.bfloat16, 64)


def test_amx_is_chosen_where_it_is(monkeypatch):
    provide("amx", monkeypatch)
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        chosen = backends.choose(torch.device("cpu"), dtype, 64)
        assert (chosen.name, chosen.path) == ("cpu_amx", contract.path_number("amx"))
    assert backends.backend("cpu_avx512").path == contract.path_number("avx512_fp16")


def test_a_gpu_gets_the_first_that_takes_its_tensors(monkeypatch):
    """The order of preference, on machines that this one is not."""
    gpu, missing = torch.device("cuda"), set()
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    monkeypatch.setattr(backends.devices, "lacks", lambda name: "missing" if name in missing else None)
    for name in ("cuda_sm90a", "cuda", "torch_cudnn", "torch_flash", "torch"):
        assert backends.choose(gpu, torch.bfloat16, 128).name == name
        missing.add(name)
    missing.clear()
    assert backends.choose(gpu, torch.float16, 64).name == "cuda"
    assert backends.choose(gpu, torch.bfloat16, 256).name == "cuda"
    assert backends.choose(gpu, torch.bfloat16, 264).name == "torch"
    missing.add("cuda")
    assert backends.choose(gpu, torch.bfloat16, 80).name == "torch_cudnn"
    assert backends.choose(gpu, torch.bfloat16, 256).name == "torch_flash"
    missing.clear()
    assert backends.choose(gpu, torch.float32, 128).name == "torch"
    assert backends.choose(torch.device("cpu"), torch.bfloat16, 128).device in ("cpu", "")
    assert backends.unfit(torch.device("cpu"), torch.bfloat16, 128, backends.backend("cuda")) == "device"


@pytest.mark.parametrize("backend", ["cpu_avx512", "cpu_amx", "cpu_avx2", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 61])
def test_rows_that_do_not_follow_each_other(backend, dtype, tokens, counts):
    """As repair computes them: a mask that says which keys its queries stand at needs no torch."""
    chosen = backends.backend(runnable(backend))
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(tokens))
    columns = shuffled[:tokens].sort().values
    query = torch.randn(1, 4, tokens, 16, dtype=dtype)
    key, value = torch.randn(2, 1, 2, 200, 16, dtype=dtype)
    seen = (torch.arange(200)[None] <= columns[:, None])[None, None]
    mask, module = registered.at(columns, 200, dtype), torch.nn.Module()
    found, _ = registered.attention(chosen, module, query, key, value, mask)
    wanted = torch_reference.attend(query.double(), key.double(), value.double(), seen, 0.25)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((found - wanted).abs().max()) <= bound * float(wanted.abs().max())
    assert counts() == {}
    unnamed, _ = registered.attention(chosen, module, query, key, value, seen)
    assert float((unnamed - wanted).abs().max()) <= bound * float(wanted.abs().max())
    assert counts() == ({} if backend == "torch" else {"mask": 1})


@pytest.mark.parametrize("name", sdpa.ORDER)
@pytest.mark.parametrize(("tokens", "keys"), [(1, 9), (9, 9), (4, 9)])
@pytest.mark.parametrize("causal", [True, False])
def test_torchs_fused_attention_means_the_same(name, tokens, keys, causal):
    """Which torch kernel answers depends on the device; the mask and the layout do not."""
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(2, 4, tokens, 16, generator=generator)
    key, value = torch.randn(2, 2, 2, keys, 16, generator=generator)
    seen = torch_reference.visible(tokens, keys, None, 0, causal, query.device)
    wanted = torch_reference.attend(query, key, value, seen, 0.3)
    assert torch.allclose(sdpa.attend(name, query, key, value, 0.3, causal), wanted, atol=1e-5)


def test_what_torchs_fused_attention_does_not_take_is_named():
    assert sdpa.unfit(None, 0, 9, 0.0, None) is None and sdpa.unfit(None, 9, 9, 0.0, None) is None
    assert sdpa.unfit(torch.zeros(1), 0, 9, 0.0, None) == "mask"
    assert sdpa.unfit(None, 8, 9, 0.0, None) == "window"
    assert sdpa.unfit(None, 0, 9, 1.0, None) == "softcap"
    assert sdpa.unfit(None, 0, 9, 0.0, torch.zeros(4)) == "sinks"


@pytest.mark.parametrize("sinks", [None, [-float("inf"), 1.5, 0.0, -3.0]])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_in_torch_a_query_without_keys_gives_zeros_and_a_nan_stays_one(sinks, softcap):
    """What the kernels do: padding is zeros whatever the sinks, and nothing hides a NaN."""
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16)
    query[0, 1, 2, 3] = float("nan")
    seen = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    seen[..., 0, :] = False
    sink_logits = None if sinks is None else torch.tensor(sinks)
    found = torch_reference.attend(query, key, key, seen, 0.25, softcap, sink_logits)
    assert bool((found[:, 0] == 0).all())
    assert bool(found[0, 2, 1].isnan().all()) and int(found.isnan().sum()) == 16


def test_installing_twice_is_refused_and_uninstalling_is_not():
    model = known("llama")
    attention.install(model, "torch")
    with pytest.raises(InvalidArgument, match="already"):
        attention.install(model)
    attention.uninstall(model)
    attention.uninstall(model)
    assert attention.installed(model) is None
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_an_install_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = known("llama")
    before = model.config._attn_implementation

    def half(name):
        model.config._attn_implementation_internal = name
        raise RuntimeError("no more")

    monkeypatch.setattr(model, "set_attn_implementation", half, raising=False)
    with pytest.raises(RuntimeError, match="no more"):
        attention.install(model, "torch")
    assert model.config._attn_implementation == before and attention.installed(model) is None
    monkeypatch.undo()
    assert attention.install(model, "torch") == "torch"


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(InvalidArgument, match="Linear is no transformers model"):
        attention.install(torch.nn.Linear(2, 2))


def test_the_kernels_memory_is_the_hosts_whatever_torchs_default_device_is(monkeypatch):
    """A process that makes its tensors on a GPU by default may have a model on the CPU."""
    monkeypatch.setattr(dense, "_local", threading.local())
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 900, 16)
    path = backends.backend(runnable("cpu_avx2")).path
    arguments = query, key, key, None, None, 0.25, 0.0, 0, True, path
    wanted = dense.attend(*arguments)
    monkeypatch.setattr(dense, "_local", threading.local())
    with torch.device("meta"):
        assert torch.equal(dense.attend(*arguments), wanted)


def test_a_mask_of_its_own_goes_to_torch_and_is_counted(counts):
    model, ids = known("llama"), prompt(40)
    seen = torch.ones((40, 40), dtype=torch.bool).tril()
    seen[20:, 5:9] = False
    with torch.no_grad():
        wanted = model(ids, attention_mask=seen[None, None]).logits
        attention.install(model, "cpu_avx512" if backends._lacks("cpu_avx512") is None else "cpu_avx2")
        found = model(ids, attention_mask=seen[None, None]).logits
    assert counts() == {"mask": 3}
    assert torch.allclose(found, wanted, atol=1e-5)


def test_packed_rows_and_right_padding_go_to_torch_and_are_counted(counts):
    """Two texts in one row, told apart by their positions; padding on the right."""
    model, ids = known("llama"), prompt(40)
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None]
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        right = model(ids, attention_mask=mask).logits
        attention.install(model, runnable("cpu_avx2"))
        assert torch.allclose(model(ids, position_ids=positions, use_cache=False).logits, packed, atol=1e-5)
        assert torch.allclose(model(ids, attention_mask=mask).logits[:, :30], right[:, :30], atol=1e-5)
    assert counts() == {"mask": 6}


def test_a_cache_of_fixed_size_goes_to_torch_and_is_counted(counts):
    """A StaticCache hands over keys that nobody has written yet."""
    model, ids = known("llama"), prompt(40)
    wanted, *_ = generate(model, ids, cache_implementation="static", disable_compile=True)
    attention.install(model, runnable("cpu_avx2"))
    found, *_ = generate(model, ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, wanted)
    assert set(counts()) == {"mask"}


def test_training_goes_to_torch_and_is_counted(counts):
    model, ids = known("llama"), prompt(20)
    wanted = torch.autograd.grad(model(ids).logits.sum(), model.lm_head.weight)[0]
    attention.install(model, runnable("cpu_avx2"))
    found = torch.autograd.grad(model(ids).logits.sum(), model.lm_head.weight)[0]
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)
    assert counts() == {"training": 3}


def test_the_operator_has_a_fake_of_the_same_shape():
    """What torch.compile traces with: shapes, types and strides without the numbers."""
    path = backends.choose(torch.device("cpu"), torch.float32, 16).path or 1
    for dtype in (torch.float32, torch.bfloat16):
        query, key = torch.randn(2, 4, 3, 16, dtype=dtype), torch.randn(2, 2, 9, 16, dtype=dtype)
        starts, sinks = torch.tensor([0, 4]), torch.randn(4)
        for extra in ((None, None), (starts, sinks)):
            torch.library.opcheck(
                dense.attend_op, (query, key, key.clone(), *extra, 0.25, 0.0, 0, True, path),
                test_utils=("test_schema", "test_faketensor"),
            )  # fmt: skip


def test_compiled_without_a_break():
    """A whole attention module in one graph: torch.compile finds the operator, which it can follow."""
    model = known("llama")
    attention.install(model, runnable("cpu_avx2"))
    layer, hidden = model.model.layers[0].self_attn, torch.randn(1, 12, 48)
    places = model.model.rotary_emb(hidden, torch.arange(12)[None])
    with torch.no_grad():
        wanted, _ = layer(hidden, places, None)
        found, _ = torch.compile(layer, backend="eager", fullgraph=True)(hidden, places, None)
    assert torch.equal(found, wanted)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4),
    reason="before transformers 5.4 where the queries stand is a tensor, whose values break the graph",
)
def test_a_whole_model_is_one_graph(counts):
    model, ids = known("llama", layers=2), prompt(23)
    with torch.no_grad():
        wanted = model(ids).logits
        attention.install(model, runnable("cpu_avx2"))
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        found = compiled(ids, past_key_values=transformers.DynamicCache(config=model.config)).logits
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert counts() == {}


@pytest.mark.parametrize("name", attention.available_backends())
def test_each_backend_can_be_forced_or_says_why_not(name, monkeypatch):
    """By the environment alone, for who installs kernels and for who asks which he would get."""
    monkeypatch.setenv(backends.ENVIRONMENT, name)
    model = known("llama", layers=1)
    if reason := attention.available_backends()[name]:
        said = re.escape(f"KVCLIENT_BACKEND: backend {name} cannot run here: {reason}")
        with pytest.raises(InvalidArgument, match=said):
            attention.install(model)
        assert attention.installed(model) is None
        return
    assert attention.backend_of(model).name == name
    assert attention.install(model) == attention.installed(model) == name
