"""python -m kvclient.hf.streaming DIR --memory 2GiB --prompt "..." [--json]

Owns the command: loads a checkpoint under a limit, generates, and prints tokens a second beside the most that
the disk allows. Never asks a hub. Invariant: the figures are of the tokens it printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from kvclient.errors import InvalidArgument, KVClientError
from kvclient.hf import awq
from kvclient.hf.speculation import DraftModel, PromptLookup, Speculation
from kvclient.hf.streaming import (
    StreamingCausalLM,
    StreamingConfig,
    expected_s,
    streaming_stats,
    write_trace,
)
from kvclient.hf.streaming.files.checkpoint import HUB_ID, fetched
from kvclient.hf.streaming.planner.admission import Admission
from kvclient.hf.streaming.planner.asked import PIECES
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import RESIDENCIES, free_memory

STEPS = {"progress": "rearranging", "loading": "loading"}
UNITS = {"KiB": 10, "MiB": 20, "GiB": 30}


def memory(text: str) -> int:
    """Bytes of `2GiB`, `512MiB` or a plain number. Raises ArgumentTypeError for anything else."""
    number, shift = (text[:-3], UNITS[text[-3:]]) if text[-3:] in UNITS else (text, 0)
    try:
        return int(float(number) * (1 << shift))
    except (ValueError, OverflowError):
        units = ", ".join(UNITS)
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, with or without {units}") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    name, about = "python -m kvclient.hf.streaming", "Generates with a model whose layers are read from disk."
    asked = argparse.ArgumentParser(prog=name, description=about)
    asked.add_argument("directory", help="of safetensors, AWQ or plain; or a hub id that was fetched")
    asked.add_argument("--memory", type=memory, help="for all of it, as 2GiB; default: what is free")
    asked.add_argument("--device", default="cpu", help="cuda: --memory is of it, the rest in the host's")
    asked.add_argument("--host-threads", type=int, help="of the host, that computes layers beside cuda")
    asked.add_argument("--residency", choices=RESIDENCIES, default="auto")
    for end in ("first", "last"):
        asked.add_argument(f"--keep-{end}-k", type=int, default=4, help=f"partial_resident: the {end} layers")
    asked.add_argument("--prompt", default="The capital of France is")
    asked.add_argument("--max-new-tokens", type=int, default=16)
    asked.add_argument("--auto-truncate", action="store_true", help="beyond --memory: its last tokens")
    asked.add_argument("--slots", type=int, default=2, help="layers in memory of those that are streamed")
    asked.add_argument("--prefetch-layers-ahead", type=int, help="read before they are asked for")
    asked.add_argument("--no-rearrange", action="store_true", help="read the safetensors where they lie")
    asked.add_argument("--trace", type=Path, help="a file for Perfetto: what was read and computed when")
    asked.add_argument("--draft", help="several tokens a pass: `lookup`, or a directory of a small model")
    asked.add_argument("--branches", type=int, default=1, help="of each drafted token; more than 1: a tree")
    asked.add_argument("--nodes", type=int, default=15, help="tokens of a tree, at most")
    asked.add_argument("--json", action="store_true", help="one object on standard output, nothing else")
    return asked


def prompt_of(asked: argparse.Namespace) -> tuple[Path, Any, Any]:
    """The directory, its tokenizer, and the prompt's tokens. Raises InvalidArgument for what will not do
    however the model is loaded, before it is.
    """
    if (home := fetched(asked.directory)) is None:
        told = f"{asked.directory} is no directory with a config.json"
        if HUB_ID.fullmatch(asked.directory) and not Path(asked.directory).exists():
            told += f"; no hub is asked here: `hf download {asked.directory}`"
        raise InvalidArgument(told)
    if asked.max_new_tokens < 1:
        raise InvalidArgument(f"--max-new-tokens {asked.max_new_tokens}: at least 1")
    if asked.draft not in (None, "lookup") and fetched(asked.draft) is None:
        raise InvalidArgument(f"--draft {asked.draft}: neither `lookup` nor a directory with a config.json")
    if asked.trace is not None and not asked.trace.absolute().parent.is_dir():
        raise InvalidArgument(f"--trace {asked.trace}: {asked.trace.absolute().parent} is no directory")
    if asked.trace is not None and asked.trace.is_dir():
        raise InvalidArgument(f"--trace {asked.trace}: a directory, no file")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, local_files_only=True)
    inputs = tokenizer(asked.prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise InvalidArgument(f"--prompt {asked.prompt!r} has no tokens; at least 1")
    return home, tokenizer, inputs


def small_model(home: Path) -> Any:
    """Of a directory, in memory; packed words stay packed. Raises InvalidArgument."""
    config = transformers.AutoConfig.from_pretrained(home, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        return awq.from_pretrained(home)
    return transformers.AutoModelForCausalLM.from_pretrained(home, local_files_only=True).eval()


def drafts(asked: argparse.Namespace) -> tuple[Speculation | None, int | None]:
    """What --draft names: None, the prompt's own text, or a model; and what it leaves of --memory, which of a
    GPU is all: it lies in the host's. Raises InvalidArgument for a model that takes all, and a tree that is
    none.
    """
    named, memory, nodes = asked.draft, asked.memory, asked.nodes
    if named is None or named == "lookup":
        lookup = None if named is None else Speculation(PromptLookup(branches=asked.branches), nodes=nodes)
        return lookup, memory
    model = small_model(fetched(named) or Path(named))
    here = asked.device == "cpu"
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) if here else 0
    if memory is not None and held >= memory:
        raise InvalidArgument(f"--draft {named} holds {held} bytes, --memory is {memory}")
    made = Speculation(DraftModel(model, branches=asked.branches), nodes=nodes)
    return made, None if memory is None else memory - held


def admitted(model: torch.nn.Module, ids: torch.Tensor, asked: argparse.Namespace) -> int | None:
    """Tokens of a prompt, ids [1, tokens], that are computed at one time, fewer where memory is short; None:
    all, as they are with drafts, or where not one token is sure to fit, which is said, or where generate()
    asks by itself. Raises RequestTooLarge for a prompt that needs more than is free.
    """
    if asked.memory is not None:
        return None
    prompt = ids.shape[1]
    pieces = [prompt] if asked.draft else [prompt, *(piece for piece in PIECES if piece < prompt)]
    tried = [Admission(model, asked.memory, piece) for piece in pieces]
    admission = next((each for each in tried if each.fits(prompt, asked.max_new_tokens)), tried[-1])
    if not admission.longest(asked.max_new_tokens, most=1):  # what is free is not what it was
        least = admission.estimate(1, asked.max_new_tokens).bytes
        print(f"note: one token may take {least} bytes, there are {admission.memory}", file=sys.stderr)
        return None
    admission.admit(ids, asked.max_new_tokens)
    return admission.chunk if prompt > admission.chunk else None


def said(speculation: Speculation | None) -> dict[str, object]:
    """What speculation did, for the output; empty without."""
    if speculation is None or (last := speculation.last) is None:
        return {}
    figures = {"tokens_per_pass": last.tokens_per_pass, "acceptance": last.acceptance}
    return {"speculation": {**figures, "speed_up": last.speed_up, "passes": last.passes, "off": last.off}}


class Step:
    """A line that says how far a step of loading has come, its rate and how long it will take."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: tuple[float, int] | None = None  # when it was told, and of how much

    def __call__(self, done: int, whole: int) -> None:
        now = time.perf_counter()
        began, first = self._first = self._first or (now, done)
        line = f"\r{self._name}: {done / 2**20:.0f} of {whole / 2**20:.0f} MiB"
        if done > first:
            rate = (done - first) / max(now - began, 1e-3)
            line += f", {rate / 2**20:.0f} MiB/s, {(whole - done) / rate:.0f} s left "
        print(line, end="\n" if done == whole else "", file=sys.stderr, flush=True)


def expected(stats: Mapping[str, Any], pass_s: float | None) -> str:
    """What a token will take, as a line. stats: of streaming_stats(); pass_s: seconds; None: nothing is read.
    """
    held, moved = stats["bytes_held"], stats["bytes_per_pass"]
    line = f"holds {held / 2**20:.0f} MiB, reads {moved / 2**20:.0f} MiB a token"
    if shared := stats.get("placement", {}).get("chosen", {}).get(1):
        line += f" but for {shared.get('host', 0)} of {sum(shared.values())} layers, which the host computes"
    return line + (f"; expects {1 / pass_s:.2f} tokens a second" if pass_s else "")


def run(asked: argparse.Namespace) -> dict[str, object]:
    """Generates as the command line says: text, seconds, bytes and estimates by name."""
    began = time.perf_counter()
    home, tokenizer, inputs = prompt_of(asked)
    room = inputs["input_ids"].shape[1] + asked.max_new_tokens
    speculation, memory = drafts(asked)
    if memory is not None and asked.device == "cpu" and memory > (free := free_memory()):
        print(f"note: --memory leaves {memory} bytes, of which {free} are free", file=sys.stderr)
        memory = free  # what this process holds already counts for its cgroup, too
    config = StreamingConfig(
        residency=asked.residency, memory=memory, n_staging_slots=asked.slots,
        keep_first_k=asked.keep_first_k, keep_last_k=asked.keep_last_k,
        prefetch_layers_ahead=asked.prefetch_layers_ahead,
        rearrange=not asked.no_rearrange, trace=asked.trace is not None, device=asked.device,
        host_threads=asked.host_threads, room_tokens=room, auto_truncate=asked.auto_truncate,
    )  # fmt: skip
    steps = {name: None if asked.json else Step(what) for name, what in STEPS.items()}
    model = StreamingCausalLM.from_pretrained(home, config, **steps)
    loaded_s, stats = time.perf_counter() - began, streaming_stats(model)
    moved, pass_s = stats["bytes_per_pass"], expected_s(model)
    print(expected(stats, pass_s), file=sys.stderr)
    inputs = inputs.to(asked.device)
    options: dict[str, Any] = {"custom_generate": speculation} if speculation is not None else {}
    if piece := admitted(model, inputs["input_ids"], asked):
        options["prefill_chunk_size"] = piece
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=asked.max_new_tokens, do_sample=False, **options)
    took_s, stats = time.perf_counter() - began, streaming_stats(model)
    tokens = out.shape[1] - inputs["input_ids"].shape[1]
    rate = stats["bytes"] / stats["filling_s"] if stats.get("filling_s") else None
    if asked.trace is not None:
        write_trace(model, asked.trace)
    streams_of(model).close()
    return {
        "text": tokenizer.decode(out[0, -tokens:], skip_special_tokens=True), "tokens": tokens,
        "loaded_s": loaded_s, "expected_tokens_per_s": 1 / pass_s if pass_s else None,
        "tokens_per_s": tokens / took_s, "read_bytes_per_s": rate,
        "ceiling_tokens_per_s": rate / moved if rate and moved else None, "stats": stats,
        **said(speculation),
    }  # fmt: skip


def main() -> int:
    """The command; its exit status."""
    asked = parser().parse_args()
    try:
        found = run(asked)
    except (KVClientError, OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}) if asked.json else f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as a shell says it
    if asked.json:
        print(json.dumps(found))
        return 0
    ceiling = found["ceiling_tokens_per_s"]
    most = f"; the reads alone would allow {ceiling:.2f}" if ceiling else "; nothing is read"
    print(found["text"])
    print(f"{found['tokens']} tokens, {found['tokens_per_s']:.2f} a second{most}", file=sys.stderr)
    stats = found["stats"]
    if "link_share" in stats:
        computed, waited = sum(stats["computed_s"].values()), sum(stats["waited_s"].values())
        link = "disk" if asked.device == "cpu" else "link"
        line = f"the {link} was busy for {stats['link_share']:.0%} of the time; layers took {computed:.1f} s"
        print(f"{line} and were waited for {waited:.1f} s", file=sys.stderr)
    if "speculation" in found:
        told = found["speculation"]
        rate = f"{told['tokens_per_pass']:.2f} tokens a pass, {told['acceptance']:.0%} of the drafts right"
        print(rate, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
