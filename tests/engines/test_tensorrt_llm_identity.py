"""Proves that TensorRT-LLM's engines share blocks only if all that shapes KV is equal: every argument that
nobody said to be without effect, the environment, the bytes of the weights, of a draft's and of adapters.

Method: its arguments as a record, which is all that identity.py asks for; one thing is changed at a time.
TensorRT-LLM itself was never run.
"""

import functools
import importlib
import json
import os
import sys
import types

import numpy as np
import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.integrations import checkpoint
from tests.conftest import ROOT

Record = types.SimpleNamespace


@pytest.fixture
def identity(monkeypatch, tmp_path):
    """Of an engine with these arguments, and those of its KV cache."""
    package = types.ModuleType("kvclient.integrations.tensorrt_llm")  # whose own imports the engine
    package.__path__ = [str(ROOT / "kvclient/integrations/tensorrt_llm")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.delitem(sys.modules, package.__name__ + ".identity", raising=False)
    module = importlib.import_module(package.__name__ + ".identity")
    for name in [name for name in os.environ if name.startswith(module.VARIABLES)]:
        monkeypatch.delenv(name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")

    def of(cache=None, options=None, **change):
        monkeypatch.setenv(module.VARIABLE, json.dumps(options or {}))
        record = {
            "model": str(tmp_path / "model"), "dtype": "bfloat16", "quant_config": None,
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 1,
            "attn_backend": "TRTLLM", **change,
        }  # fmt: skip
        kept = Record(**{"dtype": "auto", "tokens_per_block": 32, **(cache or {})})
        return module.common(Record(kv_cache_config=kept, **record)).identity

    return of


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"}, {"quant_config": Record(quant_algo="FP8")}, {"attn_backend": "FLASHINFER"},
        {"tensor_parallel_size": 2}, {"load_format": "dummy"}, {"max_seq_len": 65536},
        {"sparse_attention_config": Record(algorithm="rocket", window=64)},
        {"speculative_config": Record(max_draft_len=3, speculative_model=None)},
        {"moe_config": Record(backend="CUTLASS")}, {"force_dynamic_quantization": True},
        {"model_kwargs": {"rope_scaling": {"factor": 2}}}, {"env_overrides": {"TRTLLM_X": "1"}},
        {"enable_lora": True}, {"an_argument_of_tomorrow": (1, 2)},
        {"cache": {"dtype": "fp8"}}, {"cache": {"tokens_per_block": 64}}, {"cache": {"sink_token_length": 4}},
        {"cache": {"mamba_ssm_cache_dtype": "float32"}}, {"options": {"weights_digest": "w"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_shapes_kv_misses(identity, change):
    assert identity() == identity() != identity(**change) == identity(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"max_batch_size": 64}, {"tokenizer": object()}, {"mpi_session": object()}, {"print_iter_log": True},
        {"scheduler_config": Record(policy="MAX_UTILIZATION")}, {"cache": {"free_gpu_memory_fraction": 0.5}},
        {"cache": {"host_cache_size": 1 << 30}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_has_no_effect_shares(identity, change):
    assert identity() == identity(**change)


def test_the_environment_counts(identity, monkeypatch):
    before = identity()
    variables = {"TRTLLM_ENABLE_PDL": True, "TLLM_LOG_LEVEL": False, "NVIDIA_TF32_OVERRIDE": True}
    for name, counts in variables.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, "1")
            assert (identity() != before) is counts, name


@pytest.mark.parametrize("place", ["weights", "draft", "adapters"])
def test_files_that_changed_under_the_same_path_miss(identity, tmp_path, place):
    beside = tmp_path / ("model" if place == "weights" else "beside")
    beside.mkdir(exist_ok=True)
    change = {
        "weights": {},
        "draft": {"speculative_config": Record(speculative_model_dir=str(beside))},
        "adapters": {"lora_config": Record(lora_dir=[str(beside)], max_lora_rank=8)},
    }[place]
    seen = {identity()}
    for content in (b"one", b"two"):
        (beside / "adapter_model.safetensors").write_bytes(content)
        seen |= {identity(**change), identity(**change)}
    assert len(seen) == 3


def test_a_table_counts_by_its_content_whatever_its_argument_is_called(identity, tmp_path, monkeypatch):
    """A directory without weights, and a file named from where the engine runs."""
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "tables" / "scales.json"
    table.parent.mkdir()
    places = {"tables": str(table.parent), "kv_scales": "tables/scales.json", "scales": "scales.json"}
    for name, named in places.items():
        seen = set()
        for content in ("1", "2"):
            for place in (table, tmp_path / "scales.json"):
                place.write_text(content)
            seen |= {identity(**{name: named}), identity(**{name: named})}
        assert len(seen) == 2, name


def test_a_directory_of_too_many_files_is_refused_by_name(identity, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_FILES", 1)
    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    with pytest.raises(InvalidArgument, match=r"tables: .* has over 1 files"):
        identity(tables=str(tmp_path))


@pytest.mark.parametrize(
    "thing",
    [object(), lambda: 1, np.arange(5000), np.array([1.0]), torch.tensor(1.0), [Record, lambda: 2],
     functools.partial(int, base=np.arange(5000))],
    ids=lambda thing: type(thing).__name__,
)  # fmt: skip
def test_what_has_no_text_of_its_own_is_refused_by_name(identity, thing):
    with pytest.raises(InvalidArgument, match="custom_thing is a "):
        identity(custom_thing=thing)
