"""Goal: what differs in one thing misses; an adapter's content counts; routers are told hashes and no more; a
gauge says whether the store is there.

Method: the connector's scheduler half with vLLM's own configurations, hashes, events and metrics in a process
of its own, with no engine, which is what makes it cheap; then engines with two adapters of random weights,
whose answers differ.
"""

import os
import shutil

import pytest

from tests.engines.conftest import ANSWER_S, VARIABLES, WarmVllm, python_of, run_scene
from tests.engines.vllm.test_vllm import FULL_BLOCKS, PROMPT, same
from tests.warm_python import run as run_warm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

ADAPTER = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
root, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
root.mkdir()
(root / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    "task_type": "CAUSAL_LM"}))
torch.manual_seed(seed)
tensors = {}
for layer in range(4):
    for name, rows in (("q_proj", 128), ("v_proj", 64)):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{at}.lora_A.weight"] = 0.3 * torch.randn(8, 128)
        tensors[f"{at}.lora_B.weight"] = 0.3 * torch.randn(rows, 8)
save_file(tensors, root / "adapter_model.safetensors")
"""
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_keys_events_and_the_gauge(daemon, tiny_model, tmp_path):
    kvstored = daemon()
    scene = "tests.engines.vllm.vllm_keys_scene"
    run_scene(kvstored, [scene, str(kvstored.dir), tiny_model(0), str(tmp_path)], 600.0)


@pytest.mark.parametrize("scene", ["blocks", "steps", "scheduler"])
def test_what_stands_on_a_failed_load_is_not_saved(daemon, tiny_model, scene):
    kvstored = daemon()
    module = f"tests.engines.vllm.steps.vllm_{scene}_scene"
    run_scene(kvstored, [module, str(kvstored.dir), tiny_model(0)], 600.0)


def test_what_would_be_wrong_is_refused(tiny_model):
    run_scene(None, ["tests.engines.vllm.steps.vllm_refusals_scene", tiny_model(0)], 600.0)


@pytest.mark.parametrize("way", ["connector", "spec"])
def test_a_router_hears_of_hashes_and_no_more(daemon, tiny_model, tmp_path, way):
    kvstored = daemon()
    scene = "tests.engines.vllm.vllm_events_scene"
    socket = f"ipc://{tmp_path}/events"
    run_scene(kvstored, [scene, way, str(kvstored.dir), tiny_model(0), socket], 600.0)


def adapter(path, seed):
    words = [str(python_of("vllm")), "-c", ADAPTER, path, str(seed)]
    run_warm(words, ANSWER_S, check=True, python=WarmVllm, env={**os.environ, **VARIABLES})
    return str(path)


def test_adapters_share_by_content(daemon, vllm, tiny_model, tmp_path):
    options = {"model": tiny_model(0), "store": {"dir": str(daemon().dir)}, "llm": LORA}
    first, second = vllm(options, options)
    path, other_path = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    (base,) = first.generate(PROMPT)
    (cold,) = first.generate(PROMPT, lora=["a", 1, path])
    (other,) = first.generate(PROMPT, lora=["b", 2, other_path])
    assert [answer["cached"] for answer in (base, cold, other)] == [0, 0, 0]
    assert len({tuple(answer["tokens"]) for answer in (base, cold, other)}) == 3, "the adapters do something"

    (warm,) = second.generate(PROMPT, lora=["a", 1, path])
    (warm_other,) = second.generate(PROMPT, lora=["b", 2, other_path])
    assert (warm["cached"], warm_other["cached"]) == (FULL_BLOCKS, FULL_BLOCKS)
    same(warm, cold)
    same(warm_other, other)

    shutil.rmtree(path)
    shutil.copytree(other_path, path)  # the same name and path, another content
    for engine in (first, second):
        engine.send({"do": "reset"})  # vLLM's own cache goes by name and path
        assert engine.answer() is True
    (changed,) = second.generate(PROMPT, lora=["a", 3, path])  # loaded anew, under another number
    assert changed["cached"] == 0
    same(changed, other)
    (kept,) = first.generate(PROMPT, lora=["a", 1, path])  # has the old content in memory
    assert kept["cached"] == 0
    same(kept, cold)
