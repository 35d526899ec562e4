"""kvclient-serve: a model behind OpenAI's HTTP contract, beside a daemon or on its own.

Owns the command line, the loading of the model and the life of the process. Never listens beyond loopback
unasked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvclient
from kvclient.blocks.chunker import CHUNKERS
from kvclient.blocks.layout import DEFAULT_BLOCK_TOKENS, MAX_BLOCK_TOKENS
from kvclient.errors import InvalidArgument, KVClientError
from kvclient.serve import keys, listening, settings, spared

EXAMPLES = """examples:
  kvclient-serve ./SmolLM2                          beside this host's daemon
  kvclient-serve ./model.gguf --store 2GiB          on its own, with a cache in its own memory
  kvclient-serve ./SmolLM2 --api-key-file keys      one key a line; each has a cache of its own
  kvclient-serve route URL URL                      in front of several (kvclient-serve route --help)

Every flag can stand in the --config file too, or be set as KVCLIENT_SERVE_<NAME>, as
KVCLIENT_SERVE_MAX_BATCH_SIZE=8.
"""
REPAIRS = ("calibrated", "auto", "selective", "cacheblend", "attention", "none")
BOUNDS = {  # of what is a number, the least and the most
    "max_batch_size": (1, 1024), "max_queue": (1, 1 << 16), "max_batch_tokens": (16, 1 << 20),
    "block_tokens": (16, MAX_BLOCK_TOKENS), "memory_tokens": (16, 1 << 32), "max_model_len": (1, 1 << 24),
    "request_timeout": (0.01, 7 * 86400), "draft_tokens": (1, 64), "threads": (1, 1024),
    "store": (1 << 20, 1 << 46), "memory": (1 << 20, 1 << 46), "sink_tokens": (0, 1 << 16),
}  # fmt: skip
SPINS = "10000"  # of an OpenMP thread that waits for another, before it sleeps: a fraction of a millisecond
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """Bytes of a size as a command line has it, as 512MiB. Raises ArgumentTypeError."""
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    if unit not in UNITS or not number.strip().isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB or 4GiB")
    return int(number) * UNITS[unit]


def parser() -> argparse.ArgumentParser:
    """What kvclient-serve takes on its command line."""
    out = argparse.ArgumentParser(
        "kvclient-serve", description=__doc__.split("\n\n")[0], epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = out.add_argument
    add("model", help="a directory (AWQ too), a hub id, or a .gguf file")
    listening.add_flags(out)
    add("--served-model-name", help="the name clients ask for (default: the model's last path part)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--device", default="auto", help="auto: the accelerator torch has, or else the CPU; or as cuda:1")
    add("--dir", help="the daemon's directory (default: this host's)")
    add("--namespace", default="default", help="of the daemon (default: %(default)s)")
    add("--quantization", choices=("auto", "awq"), default="auto", help="awq: refuse what is not AWQ")
    add("--memory", type=size, help="for all of it, as 4GiB: layers beyond it come from the disk; with "
        "--device cuda, of the GPU: they come from the host's memory")  # fmt: skip
    add("--store", type=size, help="without a daemon: memory for KV in this process, as 2GiB")
    add("--kv-codec", choices=("none", "int8", "int4"), default="none", help="how blocks hold KV")
    add("--repair", choices=REPAIRS, default="calibrated", help="inside prompts (default: %(default)s)")
    add("--sink-tokens", type=int, help="always computed anew at the start of what is repaired (default: 4)")
    add("--chunker", choices=CHUNKERS, default="fixed", help="where prompts are cut (default: %(default)s)")
    add(
        "--block-tokens",
        type=int,
        default=DEFAULT_BLOCK_TOKENS,
        help="of one block (default: %(default)s); "
        "KV is shared only among equals, and all parts of kvclient have the same default",
    )
    add("--max-batch-size", type=int, default=16, help="computed side by side (default: %(default)s)")
    add("--max-queue", type=int, default=128, help="waiting behind them; more get 429 (default: %(default)s)")
    add("--max-batch-tokens", type=int, default=512, help="of a prompt at one time (default: %(default)s)")
    add("--max-model-len", type=int, help="prompt and answer together (default: the model's)")
    add("--memory-tokens", type=int, default=1 << 17, help="KV of all that run (default: %(default)s)")
    add("--request-timeout", type=float, default=600, help="seconds for one request (default: %(default)s)")
    add(
        "--draft",
        help="several tokens a step, guessed before: `lookup` in the text itself, or by a small "
        "model of the same tokens (a directory, or a hub id); answers stay what they are",
    )
    add("--draft-tokens", type=int, default=8, help="guessed for one request at once (default: %(default)s)")
    add("--threads", type=int, help="of torch (default: torch's own)")
    add("--api-key", action="append", default=[], help="may be given several times; shown in `ps`")
    add("--api-key-file", type=Path, help="one key a line; empty lines and those that begin with # are none")
    add("--allow-origin", action="append", default=[],
        help="of a page elsewhere whose scripts may ask, as https://chat.example; may repeat")  # fmt: skip
    add("--warm", type=Path, help="a text whose beginning is computed before the first request")
    add("--print-config", action="store_true", help="print what was understood as JSON, and end")
    return out


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags over environment over file. Ends the process with 2 and the reason where one is wrong."""
    made = parser()
    chosen = settings.parse(made, "KVCLIENT_SERVE_", argv)
    for name, (low, high) in BOUNDS.items():
        if (value := getattr(chosen, name)) is not None and not low <= value <= high:
            made.error(f"--{name.replace('_', '-')}={value}; it must be {low} to {high}")
    if chosen.sink_tokens is not None and chosen.repair in ("auto", "calibrated", "none"):
        why = "what was measured is of its own" if chosen.repair != "none" else "it is of repairs"
        made.error(f"--sink-tokens with --repair {chosen.repair}: {why}")
    if chosen.kv_codec != "none" and chosen.chunker != "fixed":
        made.error(
            f"--kv-codec {chosen.kv_codec} with --chunker {chosen.chunker}: it wants blocks of one size"
        )
    for origin in chosen.allow_origin:
        if not re.fullmatch(r"https?://[^/\s*]+", origin):
            made.error(f"--allow-origin={origin}; a scheme and a host are wanted, as https://chat.example")
    if chosen.warm is not None:
        try:
            text = chosen.warm.read_text()
        except (OSError, ValueError) as error:
            made.error(f"--warm {chosen.warm}: {error}")
        if not text.strip():
            made.error(f"--warm {chosen.warm}: it has no text")
    listening.check(made, chosen)
    try:
        chosen.keys = keys.on_command_line(chosen.api_key)
    except ValueError as error:
        made.error(f"--api-key: {error}")
    if chosen.api_key_file is not None:
        try:
            chosen.keys += keys.in_file(chosen.api_key_file)
        except (OSError, ValueError) as error:
            made.error(f"--api-key-file: {error}")
    return chosen


def store_name(chosen: argparse.Namespace) -> str:
    """Names the KV that this server reads: equal for servers of one daemon and namespace, for a router."""
    if chosen.store:
        return uuid.uuid4().hex
    boot = Path("/proc/sys/kernel/random/boot_id")
    told = [boot.read_text() if boot.exists() else "", str(directory(chosen).resolve()), chosen.namespace]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def directory(chosen: argparse.Namespace) -> Path:
    """The daemon's."""
    from kvclient.client.connect import default_directory

    return Path(chosen.dir) if chosen.dir else default_directory()


@contextlib.contextmanager
def served(chosen: argparse.Namespace) -> Any:
    """The Asking over a loaded model, until the block ends. Ends the process (SystemExit) where the model is
    not what was wanted. Raises OSError, ValueError and KVClientError for what cannot be had.
    """
    import torch
    import transformers

    import kvclient
    from kvclient.hf.decoding.stopping import end_tokens
    from kvclient.serve.engine.loop import Loop
    from kvclient.serve.http.asking import Asking
    from kvclient.serve.scheduler import Limits
    from kvclient.serve.streamed import limited

    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if chosen.store:
        client = kvclient.InMemoryClient(chosen.store)
    else:
        where = {"dir": chosen.dir} if chosen.dir else {}
        client = kvclient.connect(on_error="miss", namespace=chosen.namespace, **where)
        if client.degraded:
            print(f"kvclient-serve: no daemon answers in {directory(chosen)}: nothing is kept until one "
                  "does. Start `kvstored serve`, or say --store 2GiB", file=sys.stderr)  # fmt: skip
    settings_of_store = {
        "repair": None if chosen.repair == "none" else chosen.repair,
        "block_tokens": chosen.block_tokens,
        "chunker": chosen.chunker,
    }
    if chosen.sink_tokens is not None:
        settings_of_store["repair"] = kvclient.hf.Repair(chosen.repair, sink_tokens=chosen.sink_tokens)
    if chosen.kv_codec != "none":
        settings_of_store["codec"] = chosen.kv_codec
    dtype = chosen.dtype if chosen.dtype == "auto" else getattr(torch, chosen.dtype)
    _is_a_model(chosen.model)
    if chosen.quantization == "awq" and not _is_awq(chosen.model):
        raise SystemExit(f"kvclient-serve: --quantization awq: {chosen.model} is no AWQ checkpoint")
    placed = chosen.device, chosen.memory
    with client, _loaded(chosen.model, client, dtype, *placed, settings_of_store) as engine:
        config = engine.model.config.get_text_config(decoder=True)
        longest = int(getattr(config, "max_position_embeddings", 0) or 4096)
        limits = Limits(
            chosen.max_batch_size,
            chosen.max_queue,
            chosen.max_batch_tokens,
            chosen.memory_tokens,
            chosen.request_timeout,
        )
        drafts = drafting(chosen, engine.model)
        if drafts is not None:
            limits = dataclasses.replace(limits, step_tokens=1 + drafts.tokens)
        loop = Loop(engine.model, engine.kv, limited(engine, limits), drafts)
        try:
            name = chosen.served_model_name or Path(chosen.model).name
            ends = engine.model.generation_config.eos_token_id
            ends = frozenset({*end_tokens(ends), *end_tokens(engine.tokenizer.eos_token_id)})
            vocabulary = engine.model.get_input_embeddings().num_embeddings
            most = engine.kv._model_state.kv.most_tokens or longest
            length = min(chosen.max_model_len or longest, longest, most)
            yield Asking(
                engine.tokenizer, name, loop, length, vocabulary, chosen.keys, ends, store_name(chosen),
                chosen.repair,
            )  # fmt: skip
        finally:
            loop.close()


def drafting(chosen: argparse.Namespace, model: Any) -> Any:
    """What --draft says. Ends the process (SystemExit) where the draft model's tokens are others."""
    import transformers

    from kvclient.hf import awq
    from kvclient.hf.speculation import DraftModel, PromptLookup
    from kvclient.serve.engine.drafting import Drafting

    if chosen.draft is None:
        return None
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if chosen.draft == "lookup":
        return Drafting(PromptLookup(), chosen.draft_tokens, vocabulary)
    _is_a_model(chosen.draft)
    if _is_awq(chosen.draft):
        small = awq.from_pretrained(_directory_of(chosen.draft), model.dtype)
    else:
        small = transformers.AutoModelForCausalLM.from_pretrained(chosen.draft, dtype=model.dtype).eval()
    try:
        drafter = DraftModel(small.to(model.device))
        drafter.begin(vocabulary)
    except InvalidArgument as error:
        raise SystemExit(f"kvclient-serve: --draft {chosen.draft}: {error}") from error
    return Drafting(drafter, chosen.draft_tokens, vocabulary)


def _loaded(
    model: str, client: Any, dtype: Any, device: str, memory: int | None, keywords: dict[str, Any]
) -> Any:
    """The Engine of a directory, a hub id, a .gguf file or an AWQ checkpoint, whose words stay packed."""
    import transformers

    from kvclient.hf import Engine, awq
    from kvclient.hf.engine.loading import chosen_device
    from kvclient.serve.streamed import streamed

    if memory is not None:
        return streamed(model, client, dtype, device, memory, keywords)
    if _is_awq(model):
        device = chosen_device(device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        packed = awq.from_pretrained(_directory_of(model), None if dtype == "auto" else dtype)
        return Engine(packed.to(device), tokenizer, client, **keywords)
    return Engine.from_pretrained(model, client, dtype=dtype, device=device, **keywords)


def _directory_of(name: str) -> str:
    """Of a hub id the one in the hub's cache, fetched first where it is not there."""
    import huggingface_hub

    return name if Path(name).is_dir() else huggingface_hub.snapshot_download(name)


def _is_a_model(name: str) -> None:
    """What cannot be one is said here: transformers would take it for a hub id. Raises InvalidArgument."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        raise InvalidArgument(f"{name} has no config.json; a .gguf file is named itself")
    if not path.exists() and (name.startswith(("/", ".", "~")) or name.endswith(".gguf")):
        raise InvalidArgument(f"{name} is not there")


def _is_awq(model: str) -> bool:
    """Whether its configuration says so; a .gguf file has none."""
    import transformers

    config = Path(model) / "config.json"
    if not Path(model).exists():  # a hub id: in the hub's cache, or fetched
        config = Path(transformers.utils.cached_file(model, "config.json"))
    if not config.is_file():
        return False
    told = json.loads(config.read_text()).get("quantization_config") or {}
    return str(told.get("quant_method")).lower() == "awq"


def first_token(asking: Any, text: str) -> float:
    """Computes a text, or as much of its beginning as there is room for, so that /health may say ready.
    Returns the seconds it took. Raises SystemExit where it fails.
    """
    import threading

    from kvclient.serve.engine.loop import Done, Failed, Job
    from kvclient.serve.engine.sampling import Sampler, Sampling
    from kvclient.serve.engine.text import Text

    began, done, said = time.perf_counter(), threading.Event(), []

    def tell(event: Any) -> None:
        said.append(event)
        if isinstance(event, Done | Failed):
            done.set()

    room = min(asking.max_tokens, asking.loop.limits.memory_tokens) - 1  # one is answered
    ids = asking.tokens(text)[: max(1, room)]
    asking.loop.submit(Job(ids, 1, Sampler(Sampling(temperature=0), ids), Text(asking.tokenizer), tell))
    done.wait()
    if isinstance(said[-1], Failed):
        raise SystemExit(f"kvclient-serve: the model computes nothing: {said[-1].message}")
    return time.perf_counter() - began


def sleep_soon() -> None:
    """Of OpenMP's threads, before torch is loaded: by itself one that waits burns whole slices of a processor
    on which the thread it waits for could run. What the environment says of it stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal; the exit status. argv: without the program's name."""
    sleep_soon()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["route"]:
        from kvclient.serve.route import command

        return command.main(argv[1:])
    chosen = options(argv)
    if chosen.print_config:
        told = {k: v for k, v in vars(chosen).items() if k not in ("api_key", "keys")}
        shown = {k: str(v) if isinstance(v, Path) else v for k, v in told.items()}
        print(json.dumps({**shown, "api_keys": len(chosen.keys)}, indent=2))
        return 0
    try:
        spared.import_transformers()
        from kvclient.serve.http.app import create_app
    except ModuleNotFoundError as missing:
        hint = "pip install '.[serve,hf]' in kvstored's source"
        print(f"kvclient-serve needs {missing.name}: {hint}", file=sys.stderr)
        return 2
    door = listening.bound("kvclient-serve", chosen.host, chosen.port)
    if door is None:
        return 2
    with door, contextlib.ExitStack() as stack:
        began = time.perf_counter()
        try:
            asking = stack.enter_context(served(chosen))
        except (OSError, ValueError, KVClientError) as error:
            print(f"kvclient-serve: {chosen.model} cannot be served: {error}", file=sys.stderr)
            return 1
        first_token(asking, chosen.warm.read_text() if chosen.warm else "Hello")
        address = listening.address(chosen.host, door)
        took = time.perf_counter() - began
        print(f"{asking.model_name} is ready after {took:.1f} s at {address}", flush=True)
        line = curl(address, asking.model_name, bool(chosen.keys))
        print(f"  page   {address}/\n  curl   {line}", flush=True)
        listening.serve(create_app(asking, kvclient.__version__, chosen.allow_origin), door)
    return 0


def curl(address: str, name: str, keys: bool) -> str:
    """A line to try it with. keys: it wants one, which stands as KEY."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hi"}]})
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    return f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    sys.exit(main())
