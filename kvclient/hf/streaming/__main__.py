"""python -m kvclient.hf.streaming DIR --memory 2GiB --prompt "..." [--json]

Owns the command: loads a checkpoint under a limit, generates, and prints tokens a second beside the most that
the disk allows. Never asks a hub. Invariant: the figures are of the tokens it printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
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
from kvclient.hf.streaming.planner.gauge import Gauge, most_of, of_process
from kvclient.hf.streaming.progress import Answer, Step, expected, summary
from kvclient.hf.streaming.registry import known
from kvclient.hf.streaming.residency import RESIDENCIES, free_memory

STEPS = {"progress": "rearranging", "loading": "loading"}
NODES = 15
KEPT = ("keep_first_k", "keep_last_k")
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
    add = asked.add_argument
    add("directory", help="of safetensors, AWQ or plain; or a hub id that was fetched")
    add("--memory", type=memory, help="for all of it, as 2GiB, 512MiB or bytes; default: what is free")
    add("--device", default="cpu", help="cuda: --memory is of it, all else the host's; default: %(default)s")
    add("--host-threads", type=int, help="of the host, that computes layers beside cuda; default: none does")
    add("--residency", choices=RESIDENCIES, default="auto",
        help="what stays in memory; default: %(default)s, as many layers as --memory holds")  # fmt: skip
    for end in ("first", "last"):
        add(f"--keep-{end}-k", type=int, help=f"of partial_resident: the {end} layers that stay; default: 4")
    add("--prompt", default="The capital of France is", help="a text to go on with; default: %(default)r")
    add("--max-new-tokens", type=int, default=16, help="of the answer, the likeliest; default: %(default)s")
    add("--auto-truncate", action="store_true", help="a prompt beyond --memory loses its first tokens")
    add("--slots", type=int, default=2, help="layers in memory of those that are read; default: %(default)s")
    add("--prefetch-layers-ahead", type=int,
        help="read before they are asked for; default, and most: --slots less one")  # fmt: skip
    add("--no-rearrange", action="store_true", help="write nothing: read the safetensors where they lie")
    add("--trace", type=Path, help="a file for Perfetto: what was read and computed when")
    add("--draft", help="several tokens a pass: `lookup`, or a directory of a small model; default: one")
    add("--branches", type=int, help="of --draft: of each token, 2 to 8 make a tree; default: 1, a chain")
    add("--nodes", type=int, help=f"of --draft: tokens of a draft, at most; default: {NODES}")
    add("--json", action="store_true",
        help="one object on standard output, nothing else; an error is one on standard error")  # fmt: skip
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
    if asked.host_threads is not None and asked.device == "cpu":
        raise InvalidArgument(f"--host-threads {asked.host_threads}: only beside --device cuda")
    for name in KEPT:
        if (count := vars(asked)[name]) is not None and asked.residency != "partial_resident":
            option = name.replace("_", "-")
            raise InvalidArgument(
                f"--{option} {count}: of --residency partial_resident, not {asked.residency}"
            )
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
    named, memory, nodes, branches = asked.draft, asked.memory, asked.nodes, asked.branches
    if named is None and (nodes, branches) != (None, None):
        raise InvalidArgument(f"--branches {branches}, --nodes {nodes}: of --draft, which is not there")
    nodes, branches = (default if said is None else said for said, default in ((nodes, NODES), (branches, 1)))
    if named is None or named == "lookup":
        lookup = None if named is None else Speculation(PromptLookup(branches=branches), nodes=nodes)
        return lookup, memory
    model = small_model(fetched(named) or Path(named))
    here = asked.device == "cpu"
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) if here else 0
    if memory is not None and held >= memory:
        raise InvalidArgument(f"--draft {named} holds {held} bytes, --memory is {memory}")
    made = Speculation(DraftModel(model, branches=branches), nodes=nodes)
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
    names = ("passes", "drafted_passes", "drafted", "accepted", "tokens_per_pass", "acceptance", "speed_up")
    return {"speculation": {name: getattr(last, name) for name in (*names, "off")}}


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
        prefetch_layers_ahead=asked.prefetch_layers_ahead,
        rearrange=not asked.no_rearrange, trace=asked.trace is not None, device=asked.device,
        host_threads=asked.host_threads, room_tokens=room, auto_truncate=asked.auto_truncate,
        **{name: vars(asked)[name] for name in KEPT if vars(asked)[name] is not None},
    )  # fmt: skip
    steps = {name: None if asked.json else Step(what) for name, what in STEPS.items()}
    gauge = Gauge(of_process, 0)
    model = StreamingCausalLM.from_pretrained(home, config, **steps)
    with contextlib.closing(known(model)):  # also behind Ctrl-C, and what is refused
        loaded_s, stats = time.perf_counter() - began, streaming_stats(model)
        moved, pass_s = stats["bytes_per_pass"], expected_s(model)
        print(expected(stats, pass_s), file=sys.stderr)
        inputs = inputs.to(asked.device)
        options: dict[str, Any] = {"custom_generate": speculation} if speculation is not None else {}
        if piece := admitted(model, inputs["input_ids"], asked):
            options["prefill_chunk_size"] = piece
        answer = Answer(tokenizer, None if asked.json else sys.stdout)
        options["stopping_criteria"] = transformers.StoppingCriteriaList([answer])
        began = time.perf_counter()
        with answer, torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=asked.max_new_tokens, do_sample=False, **options)
            took_s, text = time.perf_counter() - began, answer.end(out)
        stats, tokens = streaming_stats(model), len(answer.times_s)
        rate = stats["bytes"] / stats["filling_s"] if stats.get("filling_s") else None
        if asked.trace is not None:
            write_trace(model, asked.trace)
        return {
            "text": text, "tokens": tokens, "loaded_s": loaded_s, **answer.took(),
            "prompt_cut": inputs["input_ids"].shape[1] - answer.prompt,
            "expected_tokens_per_s": 1 / pass_s if pass_s else None,
            "tokens_per_s": tokens / took_s, "read_bytes_per_s": rate,
            "ceiling_tokens_per_s": rate / moved if rate and moved else None,
            "taken_bytes": most_of(model, gauge), "stats": stats, **said(speculation),
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
    for line in summary(found, "disk" if asked.device == "cpu" else "link"):
        print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
