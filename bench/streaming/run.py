"""One measurement of bench.streaming in a process of its own, so that a limit holds for it alone.

`python -m bench.streaming.run WHO DIR ...` prints one JSON object. Owns nothing. Never imports, before it
knows WHO, what another program's environment has not: torch, kvclient. Invariant: what is timed is decoding,
token by token, behind a first answer that is not counted; of `reads`, layers that are read into slots in turn
with nothing computed, `fio` on the same file before each round and after the last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bench.streaming.products import bandwidth, prefill

PROMPT_TOKENS = 35  # a round of the made model's text, and the beginning of the next


def prompt_of(tokens: int) -> list[int]:
    """What the made model would say itself: a round of 32, again and again."""
    return [token % 32 for token in range(tokens)]


def ours(args: argparse.Namespace) -> dict:
    import torch

    import kvclient.hf.streaming.residency as residency
    from bench.streaming.draft import draft_model, size
    from kvclient.hf.speculation import Speculation
    from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, streaming_stats
    from kvclient.hf.streaming.registry import streams_of

    torch.set_num_threads(args.threads)
    small = draft_model() if args.draft == "model" else None
    drafts = size(small) if small is not None else 0
    began = time.perf_counter()
    free = residency.free_memory()
    memory = args.memory or min(free, args.most - drafts if args.most else free)
    config = StreamingConfig(residency=args.residency, memory=memory, n_staging_slots=args.slots)
    model = StreamingCausalLM.from_pretrained(args.path, config)
    loaded_s = time.perf_counter() - began
    ids = torch.tensor([prompt_of(args.prompt_tokens)])
    # A clock that stands: it always drafts.
    speculation = Speculation(small, clock=lambda: 0.0) if args.draft else None
    options = {"custom_generate": speculation} if speculation else {}
    marks: list[tuple] = []

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time(), streaming_stats(model)))

    def seen(_ids, _scores, **_):
        if not marks:
            mark()  # of the first token; later ones are timed when nothing is read beside them
            streams_of(model).settle()
            mark()
        elif len(_ids[0]) == args.prompt_tokens + args.tokens + 1:
            mark()
        return torch.zeros(1, dtype=torch.bool)

    began, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids),  # else token 0 in it is taken for padding
            max_new_tokens=args.tokens + 1, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=[seen], **options,
        )  # fmt: skip
    (first_at, first_cpu, _), (there_at, there_cpu, before), (last_at, last_cpu, after) = marks
    took, said = last_at - there_at, out[0, args.prompt_tokens :].tolist()
    found = {
        "memory": memory, "loaded_s": loaded_s, "first_s": first_at - began, "first_cpu_s": first_cpu - cpu,
        "settled_s": there_at - first_at, "tokens_per_s": args.tokens / took, "draft_bytes": drafts,
        "cpu_s_per_token": (last_cpu - there_cpu) / args.tokens, "bytes_held": after["bytes_held"],
        "bytes_per_pass": after["bytes_per_pass"],
        "stay": sum(not parts for parts in streams_of(model).plan.streamed),
        "right": said == [(args.prompt_tokens + i) % 32 for i in range(len(said))],
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
    params.n_ctx, params.n_batch, params.warmup = 2048, 512, False
    params.no_extra_bufts = args.most is not None  # else it packs the weights anew: a copy of all of them
    params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    began = time.perf_counter()
    server = xllamacpp.Server(params)
    print(f"loaded after {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    asked = {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
    server.handle_completions({**asked, "prompt": prompt_of(4), "n_predict": 1})
    print(f"a first answer after {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    prompt = prompt_of(args.prompt_tokens)
    answer = server.handle_completions({**asked, "prompt": prompt, "n_predict": args.tokens + 1})
    told = answer.get("timings") or {}
    return {"tokens_per_s": told.get("predicted_per_second"), "prompt_per_s": told.get("prompt_per_second")}


def _dense(model, args: argparse.Namespace) -> dict:
    """Tokens a second of what generates as a model of transformers does, behind the first."""
    import torch

    marks: list[float] = []

    def seen(_ids, _scores, **_):
        marks.append(time.perf_counter())
        return torch.zeros(1, dtype=torch.bool)

    ids = torch.tensor([prompt_of(args.prompt_tokens)])
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens + 1, do_sample=False,
            eos_token_id=None, pad_token_id=0, stopping_criteria=[seen],
        )  # fmt: skip
    return {"tokens_per_s": args.tokens / (marks[-1] - marks[0])}


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
        return {"loaded_s": loaded_s, **_dense(model, args)}


def airllm(args: argparse.Namespace) -> dict:
    """It links files that hold one module each, as the checkpoint's do, and writes none."""
    import contextlib
    import tempfile

    import torch

    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.path.parent) as home, contextlib.redirect_stdout(sys.stderr):
        from airllm import AutoModel

        _numbered(args.path, Path(home))
        model = AutoModel.from_pretrained(home, device="cpu", dtype=torch.bfloat16)
        loaded_s = time.perf_counter() - began
        return {"loaded_s": loaded_s, **_dense(model, args)}


def _numbered(home: Path, into: Path) -> None:
    """The checkpoint by names that AirLLM reads numbers in: its files as they are asked for."""
    held = json.loads((home / "model.safetensors.index.json").read_text())
    layers = sorted(name for name in set(held["weight_map"].values()) if name.startswith("layer-"))
    ends = ("embed_tokens", "norm", "lm_head")
    first, *last = (next(n for n in held["weight_map"].values() if f"{end}.weight." in n) for end in ends)
    order = [first, *layers, *last]
    names = {file: f"model-{i:05}-of-{len(order):05}.safetensors" for i, file in enumerate(order, 1)}
    for file, name in names.items():
        (into / name).hardlink_to(home / file)
    held["weight_map"] = {tensor: names[file] for tensor, file in held["weight_map"].items()}
    (into / "model.safetensors.index.json").write_text(json.dumps(held))
    for file in [*home.glob("tokenizer*"), home / "config.json", home / "generation_config.json"]:
        (into / file.name).write_bytes(file.read_bytes())


def bare(args: argparse.Namespace) -> dict:
    from bench.streaming.bare import bare

    return bare(args)


def reads(args: argparse.Namespace) -> dict:
    from statistics import median

    from bench.streaming.limited import Fio
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


RUNS = {
    "ours": ours, "llama": llama, "accelerate": accelerate, "airllm": airllm, "reads": reads, "bare": bare,
    "prefill": lambda args: prefill(args.prompt_tokens, args.threads),
    "bandwidth": lambda args: {"bytes_per_s": bandwidth(args.threads)},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.streaming.run")
    parser.add_argument("who", choices=tuple(RUNS))
    parser.add_argument("path", type=Path, nargs="?", help="a checkpoint; prefill and bandwidth need none")
    parser.add_argument("--memory", type=int, help="bytes; default: what is free")
    parser.add_argument("--most", type=int, help="bytes, where that is less")
    parser.add_argument("--residency", default="auto")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--stay", type=int, default=0, help="of bare: layers in their own memory")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", choices=("lookup", "model"))
    args = parser.parse_args()
    print(json.dumps(RUNS[args.who](args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
