"""Proves that SGLang's engines share pages only if all that shapes KV is equal: every argument that nobody
said to be without effect, the environment, the bytes of the weights, of a draft's and of each adapter's.

Method: SGLang's configuration as its process publishes it, made here, for the package needs a GPU; one thing
is changed at a time. That the names are SGLang's own is checked where its wheel is unpacked.
"""

import importlib
import os
import re
import sys
import types

import pytest

from kvclient.errors import InvalidArgument
from tests.conftest import ROOT
from tests.engines.conftest import CACHE

NAMESPACES = {
    "host": "serving", "port": "serving", "log_level": "observability", "max_running_requests": "schedule",
    "hicache_ratio": "memory", "weight_version": "serving", "cuda_graph_max_bs_decode": "exec.graph",
    "disaggregation_mode": "disagg",
}  # fmt: skip
RECORD = [  # as SGLang's own: what differs in one of these misses
    ("dtype", "bfloat16", "float16"), ("kv_cache_dtype", "auto", "fp8_e4m3"), ("quantization", None, "fp8"),
    ("context_length", None, 65536), ("json_model_override_args", "{}", '{"rope_scaling": {"factor": 2}}'),
    ("model_impl", "auto", "transformers"), ("attention_backend", "fa3", "triton"),
    ("prefill_attention_backend", None, "triton"), ("enable_tf32_matmul", False, True),
    ("speculative_algorithm", None, "EAGLE"), ("speculative_num_steps", None, 3),
    ("speculative_draft_kv_cache_dtype", None, "fp8_e4m3"), ("mamba_ssm_dtype", "float32", "bfloat16"),
    ("moe_runner_backend", "auto", "triton"), ("enable_lora", False, True),
    ("lora_backend", "csgmv", "triton"), ("weight_version", "default", "step-1"),
    ("load_format", "auto", "gguf"), ("device", "cuda", "cpu"),
    ("an_argument_of_tomorrow", None, {"nested": [1, (2.5, "x")]}),
]  # fmt: skip
QUIET = [
    ("host", "127.0.0.1", "::"), ("port", 30000, 30001), ("log_level", "info", "debug"),
    ("max_running_requests", 8, 64), ("hicache_ratio", 2.0, 3.0), ("cuda_graph_max_bs_decode", 8, 16),
    ("random_seed", 1, 2), ("nccl_port", 1, 2), ("disaggregation_mode", "null", "prefill"), ("tp_size", 1, 2),
]  # fmt: skip


class Context:
    """SGLang's runtime context, as far as it is asked."""

    def __init__(self, **arguments):
        self.server_args, self.arguments, self.log = object(), arguments, []

    def resolved_server_args_dict(self):
        return {**self.arguments, **{k: v for _, fields in self.log for k, v in fields.items()}}

    def overrides_log(self):
        return list(self.log)


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    """naming, served; serve(**arguments): the identity of an engine with those, as its process has them."""
    package = types.ModuleType("kvclient.integrations.sglang")  # whose own imports the engine
    package.__path__ = [str(ROOT / "kvclient/integrations/sglang")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for part in (".naming", ".served"):
        monkeypatch.delitem(sys.modules, package.__name__ + part, raising=False)
    naming, served = (importlib.import_module(package.__name__ + part) for part in (".naming", ".served"))
    utils = types.SimpleNamespace(namespace_of=lambda kind: NAMESPACES)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.arg_utils", utils)
    for name in [name for name in os.environ if name.startswith(served.VARIABLES)]:
        monkeypatch.delenv(name)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank", "logical_page_size"), 0)
    sizes = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size", "dcp_size"), 1)
    kind = {"should_split_heads": False, "is_mla_model": False, "model_name": "m"}
    config = types.SimpleNamespace(**kind, **ranks, **sizes)
    default = {name: value for name, value, _ in RECORD + QUIET} | {"model_path": str(model)}

    def publish(context):
        monkeypatch.setitem(sys.modules, served.CONTEXT, types.SimpleNamespace(get_context=lambda: context))

    def serve(*, identity="", path="", **changed):
        publish(Context(**{**default, **changed}))
        options = {"model_identity": identity, "model_path": path}
        told = {"weights": served.weights_of(options), "engine": served.engine_of(options)}
        return naming.PageNames(config, told, object(), "bfloat16", "kv", "in place", [64]).identity

    yield types.SimpleNamespace(naming=naming, served=served, model=model, serve=serve, publish=publish)


@pytest.mark.parametrize(("name", "usual", "other"), RECORD, ids=[name for name, *_ in RECORD])
def test_an_argument_that_shapes_kv_misses_what_has_another(sglang, name, usual, other):
    assert sglang.serve(**{name: usual}) == sglang.serve() != sglang.serve(**{name: other})


@pytest.mark.parametrize(("name", "usual", "other"), QUIET, ids=[name for name, *_ in QUIET])
def test_an_argument_without_effect_shares(sglang, name, usual, other):
    assert sglang.serve(**{name: usual}) == sglang.serve(**{name: other})


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("SGLANG_ROPE_CACHE_FP32", True), ("SGLANG_DSV4_KV_LAYOUT", True), ("FLASHINFER_DISABLE_X", True),
        ("SGLANG_OPT_DSV41_BF16_INDEX_LOGITS", True), ("NVIDIA_TF32_OVERRIDE", True),
        ("USE_TRITON_W8A8_FP8_KERNEL", True), ("SGLANG_LOG_MS", False), ("SGLANG_PORT", False),
        ("SGLANG_WARMUP_TIMEOUT", False), ("SGLANG_TORCH_PROFILER_DIR", False), ("HOME_OF_OTHERS", False),
    ],
)  # fmt: skip
def test_a_variable_that_shapes_kv_misses(sglang, monkeypatch, name, counts):
    before = sglang.serve()
    monkeypatch.setenv(name, "1")
    assert (sglang.serve() != before) is counts
    assert before != sglang.serve(identity="m1") == sglang.serve(identity="m1") != sglang.serve(identity="m2")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "sub/more.safetensors", "scales.npz", "model.py"]
)
def test_a_file_that_changed_under_the_same_path_misses(sglang, name):
    file = sglang.model / name
    file.parent.mkdir(exist_ok=True)
    seen = {sglang.serve()}
    for content in (b"one", b"two"):
        file.write_bytes(content)
        seen.add(sglang.serve())
    assert len(seen) == 3
    (sglang.model / "README.md").write_text("words")
    assert sglang.serve() in seen


@pytest.mark.parametrize(
    "argument", ["speculative_draft_model_path", "quantization_param_path", "lora_paths", "uno_lora_path"]
)
def test_files_that_an_argument_names_count_by_content(sglang, tmp_path, argument):
    place = tmp_path / "beside"
    place.mkdir()
    file = place / "adapter_model.safetensors"

    def value():
        if argument == "lora_paths":
            return [{"lora_id": "x", "lora_name": "a", "lora_path": str(place), "pinned": False}]
        return str(file if argument == "quantization_param_path" else place)

    seen = {sglang.serve()}
    for content in (b"one", b"two"):
        file.write_bytes(content)
        seen |= {sglang.serve(**{argument: value()}), sglang.serve(**{argument: value()})}
    assert len(seen) == 3
    if argument == "lora_paths":
        mapping = {"a": str(place)}
        assert sglang.serve(lora_paths=mapping) == sglang.serve(lora_paths=[f"a={place}"]) in seen
        assert sglang.serve(lora_paths={"b": str(place)}) not in seen
    else:
        moved = place.rename(tmp_path / "elsewhere")
        named = moved / file.name if argument == "quantization_param_path" else moved
        assert sglang.serve(**{argument: str(named)}) in seen


def test_the_weights_are_those_that_are_served(sglang, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"other")
    assert sglang.serve(path=str(sglang.model)) == sglang.serve()
    with pytest.raises(InvalidArgument, match="SGLang serves"):
        sglang.serve(path=str(other))
    with pytest.raises(InvalidArgument, match="nowhere"):
        sglang.serve(model_path="no/nowhere")


def test_without_sglangs_arguments_only_a_name_answers_for_them(sglang, monkeypatch):
    monkeypatch.delitem(sys.modules, sglang.served.CONTEXT, raising=False)
    with pytest.raises(InvalidArgument, match="model_identity"):
        sglang.served.engine_of({"model_identity": "", "model_path": str(sglang.model)})
    assert sglang.served.engine_of({"model_identity": "m1", "model_path": ""}) == {"environment": {}}
    with pytest.raises(InvalidArgument, match="model_path"):
        sglang.served.weights_of({"model_identity": "", "model_path": ""})


def test_weights_that_change_while_the_engine_runs_are_noticed(sglang):
    context = Context(model_path=str(sglang.model))
    sglang.publish(context)
    context.log.append(("elastic", {"ep_size": 2}))
    assert sglang.served.updates() == 0
    context.log.append(("model_runner.update_model_fields", {"model_path": "/new", "load_format": "auto"}))
    context.log.append(("scheduler.weight_version", {"weight_version": "2"}))
    assert sglang.served.updates() == 2
    with pytest.raises(InvalidArgument, match="changed in this engine"):
        sglang.served.weights_of({"model_identity": "", "model_path": ""})
    assert sglang.served.weights_of({"model_identity": "m2", "model_path": ""}) == "given:m2"


@pytest.mark.engines
def test_what_is_said_to_have_no_effect_are_arguments_of_sglang(sglang):
    home = CACHE / "sglang" / "sglang" / "srt" / "arg_groups" / "fields"
    if not home.exists():
        pytest.skip(f"sglang is not in {CACHE}; `make engines` puts it there")
    text = "\n".join(path.read_text() for path in home.glob("*.py"))
    names = set(re.findall(r"^    (\w+): ", text, re.M))
    places = set(re.findall(r'_NS_PATH = "([\w.]+)"', text))
    served = sglang.served
    assert {*served.QUIET, *served.COUNTED_OF_THEM} <= names
    assert {*served.WEIGHT_FIELDS, "lora_paths", "speculative_draft_model_path"} <= names
    assert set(served.QUIET_NAMESPACES) <= places
