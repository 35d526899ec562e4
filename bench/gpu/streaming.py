"""A 32B AWQ model on 8 GiB of a GPU: `python -m bench.gpu.streaming`, and a row of bench.gpu.

Owns the model: the shapes of Qwen2.5-32B, random words, made in the host's memory and nowhere else. The
device's memory is limited to --memory, its context counted: torch may not take more. Tokens are decoded one
by one with all layers streamed, and with as many as must be; then some of them are the host's. A share is of
the rate at which one pinned tensor is copied in the same run. Invariant: what is called a token was chosen on
the host before the next was begun.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bench.gpu import clock as gpu_clock
from kvclient.hf.streaming import StreamingConfig, frame
from kvclient.hf.streaming.device import Cuda, DeviceStreams, assemble

PREFIX, GROUP, POOL_BYTES = "model.layers", 128, 64 << 20


@dataclass(frozen=True)
class Shape:
    """Of a model of Qwen2's kind."""

    hidden: int = 5120
    ffn: int = 27_648
    layers: int = 64
    heads: int = 40
    kv_heads: int = 8
    vocabulary: int = 152_064

    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Inputs, outputs and whether there is a bias, by name."""
        narrow = self.hidden // self.heads * self.kv_heads
        return {
            "self_attn.q_proj": (self.hidden, self.hidden, True),
            "self_attn.k_proj": (self.hidden, narrow, True),
            "self_attn.v_proj": (self.hidden, narrow, True),
            "self_attn.o_proj": (self.hidden, self.hidden, False),
            "mlp.gate_proj": (self.hidden, self.ffn, False),
            "mlp.up_proj": (self.hidden, self.ffn, False),
            "mlp.down_proj": (self.ffn, self.hidden, False),
        }

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
            "use_sliding_window": False, "dtype": "float16",
            "quantization_config": {
                "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True
            },
        }  # fmt: skip


SMALL = Shape(hidden=256, ffn=512, layers=6, heads=4, kv_heads=2, vocabulary=512)


class Random:
    """A tensor that no file has. Words and embeddings begin somewhere else in the pool, each."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], number: int = 0) -> None:
        self.name, self.dtype, self.shape, self._number = name, dtype, shape, number
        self.length = int(np.prod(shape)) * getattr(torch, dtype).itemsize

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """As kvclient.hf.streaming.files.headers.Source."""
        kind, (leaf, _) = self.name.rpartition(".")[2], (self.name, 0)
        if kind == "qweight":
            _from_pool(np.frombuffer(memory, np.uint8), _words(), self._number, start)
        elif kind == "qzeros":
            np.frombuffer(memory, np.uint8)[:] = 0x77
        elif kind == "scales":
            np.frombuffer(memory, np.float16)[:] = np.float16(2e-4)
        elif "norm" in leaf:
            np.frombuffer(memory, np.float16)[:] = np.float16(1)
        else:
            _from_pool(np.frombuffer(memory, np.uint8), _numbers(), self._number, start)


_pools: dict[str, np.ndarray] = {}


def _words() -> np.ndarray:
    if "words" not in _pools:
        _pools["words"] = np.random.default_rng(7).integers(0, 256, POOL_BYTES, np.uint8)
    return _pools["words"]


def _numbers() -> np.ndarray:
    if "numbers" not in _pools:
        dice = np.random.default_rng(8).standard_normal(POOL_BYTES // 2, np.float32) * np.float32(0.02)
        _pools["numbers"] = dice.astype(np.float16).view(np.uint8)
    return _pools["numbers"]


def _from_pool(into: np.ndarray, pool: np.ndarray, number: int, start: int) -> None:
    at, start = 0, (number * 1_000_002 + start) % len(pool)
    while at < len(into):
        length = min(len(into) - at, len(pool) - start)
        into[at : at + length] = pool[start : start + length]
        at, start = at + length, 0


def sources(shape: Shape) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each layer's tensors by name, and those outside."""
    layers = []
    for number in range(shape.layers):
        found: dict[str, Any] = {}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.weight"] = Random(f"{name}.weight", "float16", (shape.hidden,))
        for i, (name, (inputs, outputs, bias)) in enumerate(shape.linears().items()):
            kinds = {
                "qweight": ("int32", (inputs, outputs // 8)),
                "qzeros": ("int32", (inputs // GROUP, outputs // 8)),
                "scales": ("float16", (inputs // GROUP, outputs)),
            }
            if bias:
                kinds["bias"] = ("float16", (outputs,))
            for kind, (dtype, of) in kinds.items():
                found[f"{name}.{kind}"] = Random(f"{name}.{kind}", dtype, of, 16 * number + i)
        layers.append(found)
    wide = (shape.vocabulary, shape.hidden)
    rest = {
        "model.embed_tokens.weight": Random("model.embed_tokens.weight", "float16", wide, 1),
        "lm_head.weight": Random("lm_head.weight", "float16", wide, 2),
        "model.norm.weight": Random("model.norm.weight", "float16", (shape.hidden,)),
    }
    return layers, rest


def opened(shape: Shape, config: StreamingConfig, runtime: Any) -> tuple[Any, DeviceStreams]:
    """The model, and what streams it."""
    with TemporaryDirectory() as home:
        (Path(home) / "config.json").write_text(json.dumps(shape.config()))
        model, group = frame.empty_model(Path(home), torch.float16)
    return assemble(model, group, PREFIX, *sources(shape), config, runtime)


@torch.inference_mode()
def decoded(model: Any, runtime: Any, tokens: int, warm: int) -> dict[str, Any]:
    """Greedily, behind a prompt of 16. Seconds a token, and what the streams counted meanwhile."""
    from kvclient.hf.streaming.device import DeviceStreams as Streams

    streams: Streams = model.bench_streams
    ids = torch.arange(100, 116, device=runtime.device)[None]
    out = model(ids, use_cache=True, logits_to_keep=1)
    for step in range(warm + tokens):
        if step == warm:
            before, began = streams.stats(), time.perf_counter()
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        assert int(token) >= 0  # on the host
        out = model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    runtime.settle()
    took, after = time.perf_counter() - began, streams.stats()
    moved = {key: after.get(key, 0) - before.get(key, 0) for key in ("bytes", "filling_s", "elapsed_s")}
    waited = [sum(found.get("waited_s", {}).values()) for found in (before, after)]
    computed = [sum(found.get("computed_s", {}).values()) for found in (before, after)]
    return {
        "tokens_per_s": tokens / took, "s_per_token": took / tokens,
        "link_gb_per_token": moved["bytes"] / tokens / 1e9, "link_gb_s": moved["bytes"] / took / 1e9,
        "link_busy": moved["filling_s"] / took, "device_waited_s": (waited[1] - waited[0]) / tokens,
        "streamed_layers_computed_s": (computed[1] - computed[0]) / tokens,
    }  # fmt: skip


def raw_rate(runtime: Any, length: int) -> float:
    """Bytes a second of one pinned tensor copied again and again: as bench.gpu's ceilings have it."""
    source = gpu_clock.pinned_bytes(length)
    into = torch.empty(length, dtype=torch.uint8, device=runtime.device)
    for _ in range(2):
        into.copy_(source, non_blocking=True)
    gpu_clock.settle()
    began, rounds = time.perf_counter(), 8
    for _ in range(rounds):
        into.copy_(source, non_blocking=True)
    gpu_clock.settle()
    return rounds * length / (time.perf_counter() - began)


def case(
    shape: Shape, config: StreamingConfig, runtime: Any, raw: float, tokens: int, warm: int
) -> dict[str, Any]:
    """One residency: what was planned, what was measured."""
    on_cuda = runtime.device.type == "cuda"
    gc.collect()  # of the case before
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    began = time.perf_counter()
    model, streams = opened(shape, config, runtime)
    model.__dict__["bench_streams"] = streams
    loaded_s, expected = time.perf_counter() - began, streams.expected_s()
    if on_cuda:
        loading_peak = torch.cuda.max_memory_allocated() - base
        torch.cuda.reset_peak_memory_stats()
    found = {
        "loaded_s": loaded_s, "streamed_layers": sum(map(bool, streams.plan.streamed)),
        "plan_bytes": streams.plan.bytes, "moved_bytes": streams.plan.moved,
        "link_measured_gb_s": (streams.link or 0) / 1e9,
        "expected_tokens_per_s": 1 / expected if expected else None,
    }  # fmt: skip
    found |= decoded(model, runtime, tokens, warm)
    found["of_raw_rate"] = found["link_gb_s"] * 1e9 / raw
    found["ceiling_tokens_per_s"] = raw / streams.plan.moved if streams.plan.moved else None
    if (placed := streams.stats().get("placement")) is not None:
        found["placement"], found["host_layers"] = placed, placed["chosen"][1].get("host", 0)
        found["of_ceiling"] = found["tokens_per_s"] / found["ceiling_tokens_per_s"]
    if on_cuda:
        found |= {
            "held_bytes": torch.cuda.memory_allocated() - base, "loading_peak_bytes": loading_peak,
            "peak_bytes": torch.cuda.max_memory_allocated() - base,
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        }  # fmt: skip
    streams.close()
    return found


def measured(
    shape: Shape, runtime: Any, memory: int, tokens: int, only: Sequence[str] = ()
) -> dict[str, Any]:
    """All cases. memory: of the device, with what its context takes."""
    result: dict[str, Any] = {"shape": asdict(shape), "memory": memory}
    left = memory
    if runtime.device.type == "cuda":
        torch.zeros(1, device=runtime.device)
        free, total = torch.cuda.mem_get_info()
        result["device"], context = torch.cuda.get_device_name(), total - free
        left -= context
        result["context_bytes"] = context
    raw = result["raw_gb_s"] = raw_rate(runtime, min(1 << 28, shape.hidden << 15)) / 1e9
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(left / total)
    layer = {"n_staging_slots": 3, "memory": left, "device": "cuda"}
    threads = len(os.sched_getaffinity(0))
    cases = {
        "full_stream": StreamingConfig(residency="full_stream", **layer),
        "auto": StreamingConfig(**layer),
        "auto, 2 slots": StreamingConfig(**layer | {"n_staging_slots": 2}),
        "full_stream, host": StreamingConfig(residency="full_stream", host_threads=threads, **layer),
        "auto, host": StreamingConfig(host_threads=threads, **layer),
    }
    result["cases"] = {}
    case(shape, cases["full_stream"], runtime, raw * 1e9, 2, 0)  # the first of a process is slower
    for name, config in cases.items():
        if only and name not in only:
            continue
        try:
            result["cases"][name] = case(shape, config, runtime, raw * 1e9, tokens, 2)
        except Exception as error:
            result["cases"][name] = {"not measured": f"{type(error).__name__}: {error}"[:600]}
        print(name, json.dumps(result["cases"][name], indent=1), flush=True)
    return result


def streamed(_ceilings: dict[str, float]) -> dict[str, Any]:
    """A row of bench.gpu, by a process of its own: torch's limit of the memory is a process's."""
    with TemporaryDirectory() as home:
        path = Path(home) / "streaming.json"
        subprocess.run([sys.executable, "-m", "bench.gpu.streaming", "--json", str(path)], check=True)
        return row(json.loads(path.read_text()))


def row(found: dict[str, Any]) -> dict[str, Any]:
    """What main() has written, by case, under the names of bench.gpu's units."""
    names = {
        "tokens_per_s": "tokens_s", "link_busy": "link_busy", "of_raw_rate": "of_pinned_copy",
        "streamed_layers": "streamed_layers", "plan_bytes": "planned_bytes", "peak_bytes": "peak_bytes",
        "host_layers": "host_layers", "of_ceiling": "of_ceiling",
    }  # fmt: skip
    return {
        name: {names.get(key, key): value for key, value in of.items() if key in (*names, "not measured")}
        for name, of in found["cases"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", type=float, default=8, help="GiB of the device")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that all runs")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    runtime = Cuda(torch.device("cuda"))
    shape = SMALL if asked.small else Shape()
    found = measured(shape, runtime, int(asked.memory * (1 << 30)), asked.tokens, asked.only)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
