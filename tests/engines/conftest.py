"""Engines of other projects, each in its own environment that `make engines` installs: none is imported
here.

Owns their processes: a test that ends leaves none. Skips with the reason where an environment is missing.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.pool_bytes import flip_in_pool
from tests.warm_python import WarmPython
from tests.warm_python import run as run_warm

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvstored" / "engines"
ANSWER = "ANSWER "
ANSWER_S = 900.0  # of two ranks that start beside much else

VARIABLES = {
    "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip


class WarmVllm(WarmPython):
    """Of the engines' environment: importing vLLM costs eight seconds of processor."""

    python = str(CACHE / "vllm" / "bin" / "python")
    imported = (
        "vllm.entrypoints.llm", "vllm.lora.request", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama", "transformers.models.llama.modeling_llama",
        "kvclient.integrations.vllm",
    )  # fmt: skip
    variables = tuple(VARIABLES.items())


def python_of(engine: str) -> Path:
    python = CACHE / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{engine} is not installed in {CACHE}; `make engines` does")
    return python


def flush(directory: Path) -> None:
    """Deletes every block of that daemon."""
    from kvstored.v1 import admin_pb2
    from tests.conformance.grpc_door import GrpcClient

    with GrpcClient(str(directory / "grpc.sock")) as door:
        door.admin.Flush(admin_pb2.FlushRequest(), timeout=60)


def drain(directory: Path, on: bool) -> None:
    """Whether that daemon takes no blocks."""
    from kvstored.v1 import admin_pb2
    from tests.conformance.grpc_door import GrpcClient

    with GrpcClient(str(directory / "grpc.sock")) as door:
        door.admin.Drain(admin_pb2.DrainRequest(on=on), timeout=60)


def on_disk(tmp_path: Path) -> tuple[str, ...]:
    """A daemon's arguments: whatever is stored is written to disk at once."""
    return ("--disk", str(tmp_path / "blocks"), "--disk-quota", "64MiB", "--disk-write-priority", "0")


def start_anew(daemon) -> None:
    """That daemon without its memory: what it has is on disk."""
    daemon.stop()
    daemon.args = [*daemon.args, "--fresh"]
    daemon.start()


def run_scene(daemon, arguments: list[str], limit_s: float, env: dict[str, str] | None = None) -> None:
    """A module run with the engines' Python, which asserts for itself and says PASSED. It asks for what only
    a test can do by a line NEED …: flip HEX, flush, drain on or off, anew, or a method of the daemon's; each
    is answered by a line. With variables of its own it imports for itself."""
    unseeded = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    process = (WarmVllm if env is None else subprocess.Popen)(
        [str(python_of("vllm")), "-m", *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=env or {**unseeded, **VARIABLES, "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    watchdog = threading.Timer(limit_s, process.kill)
    watchdog.start()
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("NEED "):
                what, *more = line.split()[1:]
                if what == "flip":
                    flip_in_pool(daemon.dir, bytes.fromhex(more[0]))
                elif what == "flush":
                    flush(daemon.dir)
                elif what == "drain":
                    drain(daemon.dir, more == ["on"])
                elif what == "anew":
                    start_anew(daemon)
                else:
                    getattr(daemon, what)()
                process.stdin.write("done\n")
                process.stdin.flush()
    finally:
        watchdog.cancel()
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()
    assert said and said[-1] == "PASSED\n", said


TINY = """
import sys, torch, transformers
torch.manual_seed(int(sys.argv[2]))
config = transformers.LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, initializer_range=0.15, max_position_embeddings=4096)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""  # with the usual range of weights the KV hardly matters: zeroed KV would give the same tokens


EAGLE = """
import json, pathlib, shutil, sys, torch
from safetensors.torch import load_file, save_file
target, draft = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
shutil.copytree(sys.argv[1], target)
weights = load_file(target / "model.safetensors")
weights["lm_head.weight"][4:] = 0  # four tokens are said only, so that random guesses are right at times
save_file(weights, target / "model.safetensors", {"format": "pt"})
draft.mkdir()
config = json.loads((target / "config.json").read_text())
(draft / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
torch.manual_seed(1)
wide, inner, kv = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 2
shapes = {"fc": (wide, 2 * wide), "layers.0.post_attention_layernorm": (wide,)}
for name, rows, columns in (("q", wide, wide), ("k", kv, wide), ("v", kv, wide), ("o", wide, wide)):
    shapes[f"layers.0.self_attn.{name}_proj"] = (rows, columns)
for name, rows, columns in (("gate", inner, wide), ("up", inner, wide), ("down", wide, inner)):
    shapes[f"layers.0.mlp.{name}_proj"] = (rows, columns)
drawn = {f"{name}.weight": 0.15 * torch.randn(shape) for name, shape in shapes.items()}
drawn["layers.0.self_attn.o_proj.weight"] *= 10  # its guesses are of what it attends to
save_file(drawn, draft / "model.safetensors")
"""


@pytest.fixture(scope="session")
def eagle_pair(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The tiny model, with four tokens to say, and an EAGLE head of random weights for it."""
    home = tmp_path_factory.mktemp("eagle")
    words = [str(python_of("vllm")), "-c", EAGLE, tiny_model(0), home / "target", home / "eagle"]
    run_warm(words, ANSWER_S, check=True, python=WarmVllm, env={**os.environ, **VARIABLES})
    return str(home / "target"), str(home / "eagle")


MIMO = """
import json, pathlib, sys, torch, transformers
from safetensors.torch import load_file, save_file
home, wide, inner, kv = pathlib.Path(sys.argv[1]), 128, 256, 64
torch.manual_seed(0)
transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
    hidden_size=wide, intermediate_size=inner, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512, initializer_range=0.15, max_position_embeddings=4096,
    tie_word_embeddings=False)).save_pretrained(home)
config = json.loads((home / "config.json").read_text())
config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
(home / "config.json").write_text(json.dumps(config))
norms = ("token", "hidden", "final", "input", "post_attention")
shapes = {f"{name}_layernorm": (wide,) for name in norms} | {"input_proj": (wide, 2 * wide)}
for name, rows, columns in (("q", wide, wide), ("k", kv, wide), ("v", kv, wide), ("o", wide, wide)):
    shapes[f"self_attn.{name}_proj"] = (rows, columns)
for name, rows, columns in (("gate", inner, wide), ("up", inner, wide), ("down", wide, inner)):
    shapes[f"mlp.{name}_proj"] = (rows, columns)
drawn = {f"{name}.weight": 0.15 * torch.randn(shape) for name, shape in shapes.items()}
drawn |= {f"self_attn.{name}_proj.bias": 0.15 * torch.randn(rows)
          for name, rows in (("q", wide), ("k", kv), ("v", kv))}
drawn["self_attn.o_proj.weight"] *= 10  # its guesses are of what it attends to
weights = load_file(home / "model.safetensors")
weights["lm_head.weight"][4:] = 0  # four tokens are said only, so that random guesses are right at times
save_file(weights | {f"model.mtp_layers.0.{name}": each for name, each in drawn.items()},
          home / "model.safetensors", {"format": "pt"})
"""


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A MiMo of random weights, whose own last layer guesses (multi-token prediction)."""
    target = tmp_path_factory.mktemp("mtp") / "mimo"
    words = [str(python_of("vllm")), "-c", MIMO, target]
    run_warm(words, ANSWER_S, check=True, python=WarmVllm, env={**os.environ, **VARIABLES})
    return str(target)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """A Llama of 0.7 M random weights by its seed."""
    made: dict[int, str] = {}

    def make(seed: int = 0) -> str:
        if seed not in made:
            target = tmp_path_factory.mktemp("model") / "tiny"  # the name says nothing about the weights
            words = [str(python_of("vllm")), "-c", TINY, target, str(seed)]
            run_warm(words, ANSWER_S, check=True, python=WarmVllm, env={**os.environ, **VARIABLES})
            made[seed] = str(target)
        return made[seed]

    return make


class VllmProcess:
    """tests/engines/vllm/vllm_process.py, and what it answers."""

    def __init__(self, log: Path, env: dict[str, str], options: dict) -> None:
        self._log = log
        with open(log, "wb") as errors:
            self.process = WarmVllm(
                [str(python_of("vllm")), "-m", "tests.engines.vllm.vllm_process"], cwd=ROOT,
                env={**os.environ, **VARIABLES, **env},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.send(options)

    def send(self, what: dict) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self):
        watchdog = threading.Timer(ANSWER_S, self.kill_all)
        watchdog.start()
        try:
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line[len(ANSWER) :])
        finally:
            watchdog.cancel()
        raise AssertionError(f"the engine ended, or said nothing for {ANSWER_S} s:\n{self.log()[-6000:]}")

    def generate(self, *prompts: list[int], **options) -> list[dict]:
        self.send({"do": "generate", "prompts": list(prompts), **options})
        return self.answer()

    def ask(self, **command) -> None:
        """What vllm_process.py answers with true."""
        self.send(command)
        assert self.answer() is True

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill_all(self) -> None:
        """Also its engine's and its workers' processes, which do not end with it and hold its pipes."""
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it leads its group from its first line on
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        self.kill_all()
        self.process.wait()


@pytest.fixture(scope="session")
def without_a_store() -> Iterator[list[VllmProcess]]:
    """The engine that runs, if one does."""
    started: list[VllmProcess] = []
    yield started
    for engine in started:
        engine.end()


@pytest.fixture
def plain(
    without_a_store: list[VllmProcess], tiny_model, tmp_path_factory: pytest.TempPathFactory
) -> VllmProcess:
    """What vLLM answers without a store: one engine for all tests, with nothing in its cache. Another is
    started where a test has left it dead, or with an answer that it did not read."""
    if without_a_store and not _is_at_rest(without_a_store[0]):
        without_a_store.clear()
    if not without_a_store:
        options = {"model": tiny_model(0), "store": None}
        engine = VllmProcess(tmp_path_factory.mktemp("plain") / "log", {}, options)
        without_a_store.append(engine)
        assert engine.answer() == "ready", engine.log()[-6000:]
    return without_a_store[0]


def _is_at_rest(engine: VllmProcess) -> bool:
    try:
        engine.ask(do="reset")
    except (AssertionError, OSError):
        engine.kill_all()
        engine.process.wait()
        return False
    return True


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Callable[..., list[VllmProcess]]]:
    """`vllm(options, options, env={...})`: engines that start side by side, and are ready."""
    python_of("vllm")
    with contextlib.ExitStack() as at_end:
        count, started = 0, []

        def start(*wanted: dict, env: dict[str, str] | None = None, ready: bool = True) -> list[VllmProcess]:
            nonlocal count
            engines = []
            for options in wanted:
                count += 1
                engines.append(VllmProcess(tmp_path / f"engine{count}.log", env or {}, options))
                at_end.callback(engines[-1].end)
            for engine in engines if ready else ():
                assert engine.answer() == "ready", engine.log()[-6000:]
            started.extend(engines)
            return engines

        yield start
        for engine in started:  # each takes seconds to end: side by side
            engine.process.stdin.close()
