"""A vLLM engine that times what it is asked, run with vLLM's own Python: `python -m bench.engines.engine`.

The first line of standard input is its options, each further one a list of calls; every answer is one line
that begins with ANSWER. A call is {"prompts": […], "tokens": n, "forget": bool}: with forget vLLM's own
prefix cache is emptied first, so that a hit comes from outside. Its answer has processor and wall time in
seconds, and how many prompt tokens were cached. Owns nothing that lasts.
"""

import json
import sys
import time

import torch

ANSWER = "ANSWER "


def engine(options: dict):
    from vllm import LLM

    return LLM(
        model=options["model"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32,
        kv_cache_memory_bytes=options.get("kv_bytes", 256 << 20), max_model_len=2048, seed=0,
        max_num_batched_tokens=4096, kv_transfer_config=options.get("transfer"),
    )  # fmt: skip


def timed(llm, call: dict) -> dict:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=call["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in call["prompts"]]
    if call.get("forget"):
        assert llm.reset_prefix_cache()
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "cached": [out.num_cached_tokens for out in outputs],
    }


def main() -> None:
    torch.set_num_threads(1)
    try:
        llm = engine(json.loads(sys.stdin.readline()))
    except Exception as error:
        print(ANSWER + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        raise
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(ANSWER + json.dumps([timed(llm, call) for call in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
