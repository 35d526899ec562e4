"""A vLLM engine in a process of its own, told what to do by lines of JSON: run with the engines' Python,
not imported.

Each answer is one line that begins with ANSWER. `fault` puts a connector between vLLM and ours that breaks
something: "zero" zeroes what was loaded, "zero-last" of the last layer, "drop" deletes the blocks between
look-up and load; a command {"do": "fault", …} arms others: "kill-load" and "kill-store" kill the process
`pid` at the third layer of the next load or store, "pause" writes a file `paused` where the third layer of
what is to be stored is computed, and waits for a file `go`, "raise" fails there, "note" writes `file` when
a request is told to ask again. With "armed" in KVSTORED_TEST_FAULT none is at the start. "drop-rank"
deletes them of the first rank only, while the file KVSTORED_TEST_WHEN is there; "drop-abort" has vLLM give
the request up in the step whose load fails, "drop-once" does not.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import LookupResult

from kvclient.integrations.vllm import KvstoredConnector, KvstoredOffloadingSpec
from kvclient.integrations.vllm.identity import of_rank

ANSWER = "ANSWER "
FAULT = os.environ.get("KVSTORED_TEST_FAULT", "")
HERE = "tests.engines.vllm.vllm_process"
TIER_ON_CPU = "tests.engines.vllm.offloading.vllm_tier_on_cpu"
ARMED = {}  # a command's
AT_LAYER = 2


def pause():
    home = Path(ARMED["dir"])
    (home / "paused").touch()
    deadline = time.monotonic() + 300
    while not (home / "go").exists() and time.monotonic() < deadline:
        select.select([], [], [], 0.01)


class FaultySpec(KvstoredOffloadingSpec):
    """Ours with one fault: "pause" before the next store, "note" when a request is to wait for another,
    "zero" where something was loaded."""

    def get_manager(self):
        made = super().get_manager()
        original = type(made).lookup

        def lookup(key, req_context):
            found = original(made, key, req_context)
            if found is LookupResult.HIT_PENDING and ARMED.get("fault") == "note":
                Path(ARMED["file"]).touch()
            return found

        made.lookup = lookup
        return made

    def get_worker(self, kv_caches):
        made = super().get_worker(kv_caches)
        original, load = made._store, made._load

        def load_nothing(names, spec):
            done = load(names, spec)
            for cache in made._caches.tensors:
                cache.tensor[spec.block_ids.tolist()] = 0
            return done

        if FAULT == "zero":
            made._load = load_nothing

        def store(names, spec, ready):
            if ARMED.get("fault") == "pause":
                pause()
                ARMED.clear()
            return original(names, spec, ready)

        made._store = store
        return made


class FaultyConnector(KvstoredConnector):
    """Ours with one fault."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is None and ARMED.get("fault") == "note":
            Path(ARMED["file"]).touch()
        return found

    def _at(self, layer_name, fault, busy):
        if ARMED.get("fault") != fault or not busy or self._worker._index[layer_name] != AT_LAYER:
            return
        os.kill(ARMED["pid"], signal.SIGKILL)
        ARMED.clear()

    def has_connector_metadata(self):
        if ARMED.get("fault") in ("pause", "raise") and self._connector_metadata.saves:
            ARMED["layers"] = ARMED.get("layers", 0) + 1
            if ARMED["layers"] > AT_LAYER:
                if ARMED["fault"] == "raise":
                    raise RuntimeError("the pass fails")
                pause()
                ARMED.clear()
        return super().has_connector_metadata()

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        original = self._worker.save_layer

        def save_layer(layer_name):
            self._at(layer_name, "kill-store", self._worker._saving)
            original(layer_name)

        self._worker.save_layer = save_layer

    def wait_for_layer_load(self, layer_name):
        self._at(layer_name, "kill-load", self._worker._loading)
        super().wait_for_layer_load(layer_name)
        last = self._worker._index[layer_name] == len(self._worker._index) - 1
        wrong = FAULT == "zero" or (FAULT == "zero-last" and last)
        if wrong and self._worker._loading:
            tensor = self._worker._tensors[self._worker._index[layer_name]]
            for moved in self._worker._loading:
                for number in moved.numbers:
                    tensor[number].zero_()

    def build_connector_meta(self, scheduler_output):
        step = super().build_connector_meta(scheduler_output)
        if FAULT == "drop":
            for load in step.loads:
                self._client.delete(load.keys[32:])
        if FAULT == "drop-rank" and Path(os.environ["KVSTORED_TEST_WHEN"]).exists():
            for load in step.loads:
                self._client.delete(of_rank(load.keys[32:], 0, 2))
        if step.loads and ARMED.get("fault") in ("drop-abort", "drop-once"):
            self._client.delete(step.loads[0].keys)
            if ARMED["fault"] == "drop-abort":
                ARMED["core"].aborts_queue.put([scheduler_output.scheduled_new_reqs[0].req_id])
            ARMED.clear()
        return step


def engine(options):
    transfer = None
    if options.get("store") is not None:
        transfer = {
            "kv_connector": "FaultyConnector" if FAULT else "KvstoredConnector",
            "kv_connector_module_path": HERE if FAULT else "kvclient.integrations.vllm",
            "kv_role": options.get("role", "kv_both"),
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options["store"],
        }
    if options.get("spec"):
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "FaultySpec" if FAULT else "KvstoredOffloadingSpec",
                "spec_module_path": HERE if FAULT else "kvclient.integrations.vllm",
                "offload_prompt_only": False, "kvstored": options["spec"], **options.get("offload", {}),
            },
        }  # fmt: skip
    if options.get("tier"):
        lower = {"type": "KvstoredTier", "module_path": "kvclient.integrations.vllm", **options["tier"]}
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TierOnCpu", "spec_module_path": TIER_ON_CPU, "cpu_bytes_to_use": 32 << 20,
                "offload_prompt_only": False, "secondary_tiers": [lower], **options.get("offload", {}),
            },
        }  # fmt: skip
    return LLM(
        model=options["model"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32,
        kv_cache_memory_bytes=options.get("kv_bytes", 64 << 20),
        max_model_len=options.get("max_tokens", 2048), seed=0,
        disable_log_stats="speculative_config" not in options.get("llm", {}),
        kv_transfer_config=transfer, **options.get("llm", {}),
    )  # fmt: skip


def guessed(llm):
    """How many tokens a draft has guessed, and how many of them rightly."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return []
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [found[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")]


def generate(llm, command):
    sampling = SamplingParams(temperature=0, max_tokens=command.get("tokens", 8), logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    for prompt in prompts:
        if "salt" in command:
            prompt["cache_salt"] = command["salt"]
    lora = LoRARequest(*command["lora"]) if "lora" in command else None  # name, number, path
    answers, before = [], guessed(llm)
    for out in llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora):
        answer = out.outputs[0]
        answers.append({
            "tokens": list(answer.token_ids),
            "logprobs": [step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True)],
            "cached": out.num_cached_tokens,
            "ended": answer.finish_reason,
            "guessed": [now - then for now, then in zip(guessed(llm), before, strict=True)],
        })  # fmt: skip
    return answers


def main():
    from tests.engines.vllm.vllm_process import ARMED as armed  # vLLM's copy of this module, not __main__

    torch.set_num_threads(1)
    os.setpgid(0, 0)
    try:
        llm = engine(json.loads(sys.stdin.readline()))
    except Exception as error:
        print(ANSWER + json.dumps({"error": repr(error)}), flush=True)
        raise
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "reset":
            answer = llm.reset_prefix_cache(reset_connector=command.get("connector", False))
        elif command["do"] == "fault":
            armed.update(command)
            answer = True
        elif command["do"] == "abandon":  # a request whose client goes away in its first step
            engine_of_it = llm.llm_engine
            armed["core"] = engine_of_it.engine_core.engine_core
            for name, ids in zip(("abandoned", "beside"), command["prompts"], strict=False):
                greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
                engine_of_it.add_request(name, {"prompt_token_ids": ids}, greedy)
            engine_of_it.step()
            engine_of_it.abort_request(["abandoned"])
            answer = True
            while engine_of_it.has_unfinished_requests():
                answer = [list(out.outputs[0].token_ids) for out in engine_of_it.step()]
        else:
            answer = generate(llm, command)
        print(ANSWER + json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # an interpreter that has vLLM ends in 3.5 s of processor, five times those of its start


if __name__ == "__main__":
    main()
