"""What a connector without hits costs an engine: one vLLM, in turn without its connector, with one that does
nothing, and with ours: `python -m bench.engines.cost`, run with vLLM's own Python.

Told as bench.engines.engine is: a line of options, then a line with the number of rounds; the answer has
milliseconds and ratios of processor time by name. In one process, because two equal engines differ by more
than what is looked for. Owns nothing that lasts.
"""

import json
import os
import random
import sys
import time
from statistics import median

import torch

from bench.engines.engine import ANSWER, engine

BATCH, BATCH_TOKENS, BATCH_PROMPT, ALONE = 8, 32, 256, 1020
WARM = 2
WAYS = ["without", "empty", "ours"]
NOTHING = {
    "take_events": (), "get_num_new_matched_tokens": (0, False), "update_state_after_alloc": None,
    "request_finished": (False, None), "request_finished_all_groups": (False, None), "start_load_kv": None,
    "wait_for_layer_load": None, "save_kv_layer": None, "wait_for_save": None,
    "get_block_ids_with_load_errors": frozenset(), "get_kv_connector_stats": None,
    "has_connector_metadata": True,
}  # fmt: skip


def empty_of(connector):
    """Of the same class for vLLM, and every call answers at once."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

    answers = {
        name: staticmethod(lambda *_, _answer=answer, **__: _answer) for name, answer in NOTHING.items()
    }
    answers["build_connector_meta"] = staticmethod(lambda output: KVConnectorMetadata())
    answers["bind_connector_metadata"] = KVConnectorBase_V1.bind_connector_metadata
    empty = object.__new__(type("Empty", (type(connector),), answers))
    empty.__dict__.update(connector.__dict__)
    return empty


class Switch:
    """Which connector the engine has."""

    def __init__(self, llm):
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._state = kv_transfer_state
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        both = (self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT)
        self._ways = {"without": (None, None), "empty": tuple(empty_of(half) for half in both), "ours": both}

    def to(self, way):
        self._scheduler.connector, self._state._KV_CONNECTOR_AGENT = self._ways[way]


def spent_s(llm, prompts, tokens):
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.process_time()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.process_time() - start


def measured(llm, vocabulary, rounds):
    switch, made = Switch(llm), random.Random(1)
    row = {}

    def fresh(count, length):
        return [[made.randrange(vocabulary) for _ in range(length)] for _ in range(count)]

    for number in range(-WARM, rounds):
        for way in random.Random(number).sample(WAYS, len(WAYS)):
            switch.to(way)
            for what, prompts, tokens in (
                ("batch", fresh(BATCH, BATCH_PROMPT), BATCH_TOKENS), ("ttft", fresh(1, ALONE), 1)
            ):  # fmt: skip
                spent = spent_s(llm, prompts, tokens)
                if number >= 0:
                    row.setdefault((what, way), []).append(spent)
    return {
        f"{way} {what}": {
            "cpu_ms": 1e3 * median(all_of), "ratio": median(all_of) / median(row[what, "without"]),
        }
        for (what, way), all_of in row.items()
    }  # fmt: skip


def main():
    torch.set_num_threads(1)
    options = json.loads(sys.stdin.readline())
    llm = engine(options)
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps(measured(llm, options["vocabulary"], json.loads(line))), flush=True)
    os._exit(0)  # a connector that was switched off is not shut down by vLLM


if __name__ == "__main__":
    main()
