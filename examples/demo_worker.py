"""One inference process of the demo: SmolLM2, a stock generate(), and the store behind it.

Reads one JSON command a line from stdin, answers one JSON line each on stdout. Started by demo.py.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several of these share the demo's machine


def main(model_dir: str, runtime_dir: str) -> None:
    import torch
    import transformers

    import kvclient
    import kvclient.hf

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with kvclient.connect(dir=runtime_dir) as client:
        kv = kvclient.hf.attach(model, client)
        answer({"ready": True, "identity": kv.identity.hex()})
        for line in sys.stdin:
            command = json.loads(line)
            answer(run(model, tokenizer, kv, **command))


def run(model, tokenizer, kv, document: str, question: str, new_tokens: int, store: bool = True) -> dict:
    import torch

    start = tokenizer.encode(document)
    ids = torch.tensor([[*start, *tokenizer.encode(question)]])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    if store:
        output = model.generate(ids, max_new_tokens=new_tokens, **options)
    else:
        with kv.bypass():
            output = model.generate(ids, max_new_tokens=new_tokens, **options)
    last = kv.last
    return {
        "text": tokenizer.decode(output[0, ids.shape[1] :]),
        "prompt_tokens": ids.shape[1],
        "reused": last.reused_tokens,
        "followed": last.followed_tokens,
        "lost": last.followed_lost,
        "published": last.published_blocks,
        "ttft_s": last.ttft_s,
        "wait_s": last.wait_s,
    }


def answer(result: dict) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
