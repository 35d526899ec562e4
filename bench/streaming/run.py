"""One measurement of bench.streaming in a process of its own, so that a limit holds for it alone.

`python -m bench.streaming.run ours|llama|accelerate|reads DIR ...` prints one JSON object. Owns nothing.
Invariant: what is timed is decoding, token by token, behind a first answer that is not counted; of `reads`,
layers that are read into slots in turn with nothing computed, `fio` on the same file before each round and
after the last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

PROMPT = [*range(32), 0, 1, 2]  # a round of the made model's text, and the beginning of the next


def ours(args: argparse.Namespace) -> dict:
    import torch

    import kvclient.hf.streaming.residency as residency
    from kvclient.hf.speculation import Speculation
    from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, streaming_stats

    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    free = residency.free_memory()
    memory = args.memory or min(free, args.most or free)
    config = StreamingConfig(residency=args.residency, memory=memory, n_staging_slots=args.slots)
    model = StreamingCausalLM.from_pretrained(args.path, config)
    loaded_s = time.perf_counter() - began
    ids = torch.tensor([PROMPT])
    speculation = Speculation(clock=lambda: 0.0) if args.draft else None  # always drafts
    options = {"custom_generate": speculation} if speculation else {}
    marks: list[tuple] = []

    def seen(_ids, _scores, **_):
        if not marks or len(_ids[0]) == len(PROMPT) + args.tokens + 1:
            marks.append((time.perf_counter(), time.process_time(), streaming_stats(model)))
        return torch.zeros(1, dtype=torch.bool)

    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids),  # else token 0 in it is taken for padding
            max_new_tokens=args.tokens + 1, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=[seen], **options,
        )  # fmt: skip
    (first_at, first_cpu, before), (last_at, last_cpu, after) = marks
    took, said = last_at - first_at, out[0, len(PROMPT) :].tolist()
    found = {
        "memory": memory, "loaded_s": loaded_s, "first_s": first_at - began,
        "tokens_per_s": args.tokens / took,
        "cpu_s_per_token": (last_cpu - first_cpu) / args.tokens, "bytes_held": after["bytes_held"],
        "bytes_per_pass": after["bytes_per_pass"],
        "right": said == [(3 + i) % 32 for i in range(len(said))],
    }  # fmt: skip
    if after.get("bytes"):
        moved, filling = (after[name] - before[name] for name in ("bytes", "filling_s"))
        found |= {
            "bytes_per_s": moved / took, "filling_share": filling / took,
            "filling_bytes_per_s": moved / filling,
        }  # fmt: skip
    if speculation is not None and speculation.last is not None:
        last = speculation.last
        found |= {"tokens_per_pass": last.tokens_per_pass, "acceptance": last.acceptance, "off": last.off}
    return found


def llama(args: argparse.Namespace) -> dict:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(args.path)
    params.n_ctx, params.n_batch, params.warmup = 512, 512, False
    params.no_extra_bufts = args.most is not None  # else it packs the weights anew: a copy of all of them
    params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    asked = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    server.handle_completions(asked)
    answer = server.handle_completions({**asked, "n_predict": args.tokens + 1})
    told = answer.get("timings") or {}
    return {"tokens_per_s": told.get("predicted_per_second"), "prompt_per_s": told.get("prompt_per_second")}


def accelerate(args: argparse.Namespace) -> dict:
    """Disk offload of all but the norm: the checkpoint's own safetensors, mapped, a module at a time."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    layers = len(list(args.path.glob("layer-*.safetensors")))
    there = {f"model.layers.{i}": "disk" for i in range(layers)}
    there |= {"model.embed_tokens": "disk", "lm_head": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        model = AutoModelForCausalLM.from_pretrained(
            args.path, device_map=there, offload_folder=home, dtype=torch.bfloat16, local_files_only=True
        )
        loaded_s = time.perf_counter() - began
        marks: list[float] = []

        def seen(_ids, _scores, **_):
            marks.append(time.perf_counter())
            return torch.zeros(1, dtype=torch.bool)

        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens + 1, do_sample=False,
                eos_token_id=None, pad_token_id=0, stopping_criteria=[seen],
            )  # fmt: skip
    return {"loaded_s": loaded_s, "tokens_per_s": args.tokens / (marks[-1] - marks[0])}


def reads(args: argparse.Namespace) -> dict:
    from statistics import median

    from bench.streaming.__main__ import Fio
    from kvclient.hf.streaming.files.index import read_index, sources
    from kvclient.hf.streaming.mover import DiskMover
    from kvclient.hf.streaming.scheduler import Scheduler

    found = read_index(args.path, sources(args.path), ())
    if found is None:
        raise SystemExit(f"{args.path} is not rearranged")
    layers = {
        number: tuple(piece for part in layer.values() for piece in part.pieces)
        for number, layer in enumerate(found.layers)
    }
    fio, disk, rates, cores = Fio(), [], [], []
    for _ in range(args.tokens):
        disk.append(fio.rate(found.paths[0]))
        scheduler = Scheduler(DiskMover(*found.paths), layers, args.slots, args.slots - 1)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(2):
            for number in layers:
                with scheduler.holding(number):
                    pass
        took = time.perf_counter() - began
        rates.append(scheduler.bytes / took)
        cores.append((time.process_time() - cpu) / took)
        scheduler.close()
    disk.append(fio.rate(found.paths[0]))
    return {"bytes_per_s": rates, "cores": cores, "fio": disk, "share": median(rates) / median(disk)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.streaming.run")
    parser.add_argument("who", choices=("ours", "llama", "accelerate", "reads"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--memory", type=int, help="bytes; default: what is free")
    parser.add_argument("--most", type=int, help="bytes, where that is less")
    parser.add_argument("--residency", default="auto")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", action="store_true")
    args = parser.parse_args()
    runs = {"ours": ours, "llama": llama, "accelerate": accelerate, "reads": reads}
    print(json.dumps(runs[args.who](args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
