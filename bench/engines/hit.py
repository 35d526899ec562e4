"""A vLLM engine that finds 1,000 tokens which another engine stored, and then finds them in its own prefix
cache with its connector switched off: run with vLLM's own Python.

Told as bench.engines.engine is: a line of options, then a line {"before": [...], "shared": [...], "ends":
[[...], [...]]} a round; the answer has the processor time of both. In one process, because two equal engines
differ by more than what is looked for; its KV cache was used once before, or every load would pay for memory
that the kernel gives at the first touch, which an engine that has run for a minute no longer does. And each
of the two comes behind a hit from the store: the first would else find the processor's caches as the other
engine left them, and be told as slower by that, whatever it does. Owns nothing that lasts.
"""

import json
import os
import sys
import time

import torch

from bench.engines.cost import Switch
from bench.engines.engine import ANSWER, engine

KV_BYTES = 128 << 20  # SmolLM2: 94 MiB for its longest prompt


def spent_s(llm, prompt):
    """Processor time, and how many tokens were found."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    start = time.process_time()
    (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return {"cpu_s": time.process_time() - start, "cached": out.num_cached_tokens}


def touch_all(llm, switch, length):
    """Prompts until each block of the engine's KV cache was used."""
    switch.to("without")
    cache = llm.llm_engine.vllm_config.cache_config
    for first in range(cache.num_gpu_blocks * cache.block_size // length + 1):
        spent_s(llm, [first % 500, first // 500, *range(length - 2)])


def main():
    torch.set_num_threads(1)
    options = json.loads(sys.stdin.readline())
    llm = engine({**options, "kv_bytes": options.get("kv_bytes", KV_BYTES)})
    switch = Switch(llm)
    touch_all(llm, switch, 400)
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        assert llm.reset_prefix_cache()
        switch.to("ours")
        spent_s(llm, asked["before"])
        found = {}
        for way, name, end in zip(("ours", "without"), ("store", "own"), asked["ends"], strict=True):
            switch.to(way)
            found[name] = spent_s(llm, asked["shared"] + end)
        print(ANSWER + json.dumps(found), flush=True)
    os._exit(0)  # a connector that was switched off is not shut down by vLLM


if __name__ == "__main__":
    main()
