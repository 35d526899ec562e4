"""Goal: beside each plan what was truly taken: a program that prints a JSON line a case; test_admission.py
judges them.

Method: load, generate, each case in a process of its own, forked behind the imports, and behind itself once
there. Its peak is the kernel's (VmHWM), forgotten before each load (/proc/self/clear_refs), less what it held
then, and less the pages of libraries that came meanwhile: the kernel takes those back, and whoever runs on
next has them again. Weights are so large that a layer that is counted twice or not at all shows.
`python -m tests.hf.streaming.planner_matrix DIR [WORD...]`: cases with all words.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
import transformers

import kvclient
from kvclient.hf import attach
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.planner.admission import Admission
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import write_checkpoint

SHAPE = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 5,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
RESIDENCIES: dict[str, dict] = {
    "full": {"residency": "full_resident"},
    "partial": {"residency": "partial_resident", "keep_first_k": 1, "keep_last_k": 1},
    "ffn": {"residency": "ffn_only_stream"},
    "stream": {"residency": "full_stream"},
    "in-place": {"residency": "full_stream", "rearrange": False},
    "in-place-full": {"residency": "full_resident", "rearrange": False},
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REQUESTS = ((40, 1), (700, 1), (200, 4))  # tokens of the prompt, rows
STORE_BYTES = 32 << 20
CODECS = ("none", "int8", "int4", "paged")


def status(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def held_now() -> int:
    """Bytes; what calls before have left is given back first, and the peak is from now on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def checkpoints(home: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Plain in both types, and packed."""
    torch.manual_seed(5)
    for stored, kind in itertools.product(TYPES, ("plain", "awq")):
        if (kind, stored) == ("awq", "fp32"):
            continue
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(TYPES[stored]).eval()
        place = home / f"{kind}-{stored}"
        place.mkdir()
        if kind == "plain":
            model.save_pretrained(place)
        else:
            write_checkpoint(place, model, 64)
        del model
        yield f"{kind}-{stored}", place


def generated(model: torch.nn.Module, prompt: int, rows: int, chunk: int) -> None:
    ids = torch.randint(1, SHAPE["vocab_size"], (rows, prompt))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, prefill_chunk_size=chunk, **options)


def case(load: Callable[[], torch.nn.Module], codec: str, prompt: int, rows: int, chunk: int) -> dict:
    before, libraries = held_now(), status("RssFile")
    model = load()
    loaded = status("VmHWM") - before
    attached = None
    if codec != "none":
        how = {"paged": True, "paged_tokens": 4096} if codec == "paged" else {"codec": codec}
        attached = attach(model, kvclient.InMemoryClient(STORE_BYTES), self_test=False, **how)
    said = Admission(model, memory=1 << 40, chunk=chunk).estimate(prompt, 3, rows)
    generated(model, prompt, rows, chunk)
    libraries = max(0, status("RssFile") - libraries)
    taken = status("VmHWM") - before - libraries
    if attached is not None:
        attached.detach()
    if (streams := streams_of(model)) is not None:
        streams.close()
    whole = said.bytes + (STORE_BYTES if codec != "none" else 0)  # the store is in this process here
    found = {"taken": taken, "said": whole, "held": said.held, "loaded": loaded, "libraries": libraries}
    return {**found, "ratio": whole / taken}


def forked(run: Callable[[], dict]) -> dict:
    """What run() answers in a process of its own. Raises RuntimeError where that failed."""
    ends = os.pipe()
    if not (child := os.fork()):
        code = 1
        # torch gave a forked process no pool once ("Invalid thread pool!"): it is asked before threads are.
        torch.set_num_threads(1)
        try:
            os.write(ends[1], json.dumps(run()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(ends[1])
    with open(ends[0], "rb") as file:
        found = file.read()
    if status := os.waitpid(child, 0)[1]:
        raise RuntimeError(f"a case ended with {status}")
    return json.loads(found)


def main() -> None:
    home, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    first = True
    for stored, place in checkpoints(home):
        for computed, residency in itertools.product(TYPES, RESIDENCIES):

            def load(place=place, computed=computed, residency=residency) -> torch.nn.Module:
                config = StreamingConfig(**RESIDENCIES[residency])
                return StreamingCausalLM.from_pretrained(place, config, dtype=TYPES[computed])

            for codec, (prompt, rows), chunk in itertools.product(CODECS, REQUESTS, (64, 512)):
                if codec != "none" and residency not in ("partial", "stream"):
                    continue
                if rows > 1 and codec == "paged":
                    continue  # the pages are one row's
                if chunk == 64 and residency != "stream":
                    continue
                named = [stored, computed, residency, codec, str(prompt), str(rows), str(chunk)]
                if not set(words) <= set(named):
                    continue
                how = (load, codec, prompt, rows, chunk)
                if first:
                    case(load, "none", prompt, rows, chunk)  # imports
                    first = False
                held_now()
                found = forked(lambda how=how: (case(*how), case(*how))[1])
                print(json.dumps({"case": named, **found}), flush=True)


if __name__ == "__main__":
    main()
