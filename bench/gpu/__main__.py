"""The GPU rows of the goals, each beside the ceiling it is a part of. `python -m bench.gpu [ROW …]`

Ceilings first (reading, copying, multiplying, pinned memory to the device), then each row: ours and torch's
best in turns. Writes every number as JSON, to $OUT if that is set, else to bench/out, and prints a table.
With --document it writes docs/gpu.md from such a file, or without one names every row as not measured. Needs
no more than torch and the libraries (`make cuda`, or .ci/gpu on a bare machine). Never judges: the reach
stands beside the number. A row that raises is not measured, and says why.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu import build as gpu_build

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, RECORD = ROOT / "docs/gpu.md", ROOT / "docs/gpu.json"


@dataclass(frozen=True)
class Row:
    """`measure`: module and function that take the ceilings and return numbers by case."""

    key: str
    what: str
    reach: str
    measure: str


ATTENTION, MOVING, TTFT = "bench.gpu.attention", "bench.gpu.moving", "bench.gpu.ttft"
STREAMING = "bench.gpu.streaming"
ROWS = [
    Row("prefill_mma", "prefill hd128 bf16 ≥ 8k, mma.sync", "≥ 350 TFLOP/s", f"{ATTENTION}:prefill"),
    Row(
        "prefill_wgmma", "prefill hd128 bf16 ≥ 8k, wgmma",
        "≥ 0.85 × cuDNN; moonshot 1.0 ×", f"{MOVING}:no_wgmma",
    ),
    Row(
        "append", "append 256–2048 over a 32k prefix; the same over int8 and int4",
        "≥ 2 × HF's SDPA; ≤ 15 % slower than bf16", f"{ATTENTION}:append",
    ),
    Row(
        "decode", "decode int8 and int4, 8 × 32k and 1 × 32k, beside the best torch bf16",
        "≥ 1.8 × and ≥ 2.9 ×; 85 % and 70 % of read; moonshot 1.9 × and 3.4 ×", f"{ATTENTION}:decode",
    ),
    Row(
        "load", "chunk load from pinned memory to usable, int8 and int4, 32k tokens",
        "≥ 95 % of the pinned copy rate; moonshot no kernel at all (in place)", f"{MOVING}:load",
    ),
    Row(
        "awq_few", "AWQ, 1–4 rows (and 16, 64), ≥ 64 MB of weights",
        "≥ 70 % of copy bandwidth; moonshot 85 %", f"{MOVING}:awq_few_rows",
    ),
    Row("awq_many", "AWQ, ≥ 256 rows", "≥ 0.9 × fp16 cuBLAS", f"{MOVING}:awq_many_rows"),
    Row("quantise", "quantise, deviation score", "", f"{MOVING}:quantise"),
    Row("ttft", "first token of an 8B model in bf16, prefix in a daemon's memory", "", f"{TTFT}:ttft"),
    Row(
        "streamed", "decode of a 32B AWQ model, 18 GB, on 8 GiB of the device",
        "the link busy ≥ 95 % of the time", f"{STREAMING}:streamed",
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(row.key for row in ROWS))
    parser.add_argument(
        "--json", type=Path, help="where to write; default: $OUT/gpu.json or bench/out/gpu.json"
    )
    parser.add_argument(
        "--document", action="store_true", help="write docs/gpu.md from docs/gpu.json, measure nothing"
    )
    options = parser.parse_args()
    if options.document:
        DOCUMENT.write_text(document(json.loads(RECORD.read_text()) if RECORD.exists() else None))
        return
    if unknown := set(options.rows) - {row.key for row in ROWS}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    target = options.json or Path(os.environ.get("OUT", ROOT / "bench/out")) / "gpu.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if not options.rows or row.key in options.rows]
    result = measured(rows, lambda found: target.write_text(json.dumps(found, indent=1)))
    print(table(result))
    print(f"wrote {target}")


def measured(rows: list[Row], write: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """write: told behind each row of what there is so far, as a machine may be lent for minutes only."""
    import torch

    from bench.gpu.clock import ceilings
    from kvclient.kernels import contract

    if not torch.cuda.is_available() or (reason := contract.cuda_lacks()):
        raise SystemExit(
            f"nothing measured: {reason if torch.cuda.is_available() else 'torch sees no CUDA device'}"
        )
    began = time.monotonic()
    result: dict[str, Any] = {"machine": machine(), "ceilings": ceilings(), "rows": {}}
    torch.cuda.empty_cache()
    for row in rows:
        module, _, function = row.measure.partition(":")
        started = time.monotonic()
        try:
            numbers = getattr(importlib.import_module(module), function)(result["ceilings"])
        except Exception as error:
            numbers = {"not measured": f"{type(error).__name__}: {error}".splitlines()[0]}
        result["rows"][row.key] = numbers
        print(f"{row.key}: {time.monotonic() - started:.0f} s", flush=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        result["seconds"] = round(time.monotonic() - began, 1)
        write(result)
    return result


def machine() -> dict[str, Any]:
    import torch

    described = torch.cuda.get_device_properties(0)
    version = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "device": described.name,
        "capability": f"{described.major}.{described.minor}",
        "memory_gib": round(described.total_memory / 2**30),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": os.environ.get("KV_COMMIT") or version.stdout.strip() or "unknown",
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


# ---------------------------------------------------------------- words

UNITS = {
    "us": (1, "µs"), "copy_us": (1, "µs one copy"), "cublas_us": (1, "µs cuBLAS"), "tflop_s": (1, "TFLOP/s"),
    "bytes_s": (1e-9, "GB/s"), "bf16_bytes_s": (1e-9, "GB/s of bf16"), "of_read": (100, "% of read"),
    "of_copy": (100, "% of copy"), "of_pinned_copy": (100, "% of the pinned copy"),
    "kernel_us_a_layer": (1, "µs the kernel, a layer"), "kernel_of_copy": (100, "% of copy, the kernel"),
    "of_cublas": (1, "× cuBLAS"), "bounced_bytes": (1e-6, "MB bounced"), "tokens_s": (1, "tokens/s"),
    "link_busy": (100, "% of the time the link was busy"), "planned_bytes": (2.0**-30, "GiB planned"),
    "peak_bytes": (2.0**-30, "GiB at most"), "streamed_layers": (1, "layers of 64 streamed"),
    "host_layers": (1, "of them computed by the host"), "of_ceiling": (1, "× the link's ceiling"),
}  # fmt: skip


def words(numbers: dict[str, Any]) -> str:
    """One case: its numbers with their units, or its contenders."""
    if all(isinstance(value, dict) for value in numbers.values()):
        return "; ".join(f"{name}: {words(value)}" for name, value in numbers.items())
    said = []
    for name, value in numbers.items():
        if name in UNITS and isinstance(value, int | float):
            factor, unit = UNITS[name]
            said.append(f"{value * factor:.4g} {unit}")
        elif value is not None and name not in ("bytes",):
            said.append(f"{name}: {value}")
    return ", ".join(said)


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown; what is not in the result is not measured."""
    lines = ["| what | reach | measured |", "|---|---|---|"]
    for row in ROWS:
        numbers = result["rows"].get(row.key, {"not measured": "not part of this run"})
        if "not measured" in numbers:
            lines.append(f"| {row.what} | {row.reach} | *not measured*: {numbers['not measured']} |")
            continue
        cases = "<br>".join(f"**{case}**: {words(figures)}" for case, figures in numbers.items())
        lines.append(f"| {row.what} | {row.reach} | {cases} |")
    return "\n".join(lines)


def sections(result: dict[str, Any]) -> str:
    """The rows as a document has them, in lines that can be read."""
    out = []
    for row in ROWS:
        numbers = result["rows"].get(row.key, {"not measured": "not part of this run"})
        out.append(f"### {row.what[0].upper()}{row.what[1:]}\n\nReach: {row.reach or 'none was set'}.\n")
        if "not measured" in numbers:
            out.append(f"*Not measured*: {numbers['not measured']}\n")
            continue
        for case, figures in numbers.items():
            named = figures if all(isinstance(x, dict) for x in figures.values()) else {"": figures}
            out.append(f"**{case}**\n")
            lines = (f"{name}: {words(of)}" if name else words(of) for name, of in named.items())
            out += [_wrapped(f"- {line}") for line in lines]
            out.append("")
    return "\n".join(out).rstrip()


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 106, subsequent_indent="  ", break_on_hyphens=False)


HEAD = """# What was run on a GPU

Written by `python -m bench.gpu --document` from gpu.json beside it, which is what `python -m bench.gpu` put
out. Nobody edits it. How the kernels are built, and proven without a GPU: [kernels.md](kernels.md).
`.ci/gpu` builds, tests and measures on a machine with nvcc and torch.
"""
OPEN = """## What was tried there besides

On 2026-11-26 and 2026-11-28, on H200s lent for 15 minutes each day (driver 580, CUDA 13.0, Python 3.12,
transformers 5.17), by `.ci/gpu tests`:

- the tests marked `gpu`, but those of wgmma, which is not written: kernels, whole models, pages, the
  transfer, steps of several requests (2026-11-28, 19:35: 921 passed in 33 s), two servers that share what one
  computed and a server's requests at once (19:56), a streamed model in every residency (32 passed);
- decode steps are captured as CUDA graphs and replayed;
- shared maps, read-only ones too, are registered: 0 MB bounced above;
- compute-sanitizer's memcheck over a choice of the kernels' tests, before the new decode kernels: no error.
  `make gpu-sanitize` whole, and racecheck, were not run.

**The streamed model** has the shapes of Qwen2.5-32B with random words (`bench/gpu/streaming.py`), in a
process of its own that torch may give 8 GiB less the context's 0.6. The row is of two runs of 12 tokens
(19:51, 19:56): whichever case came first in its process had the link busy for 81 % (auto) or 90 % (full
stream), each of the others for 99.8 %. What the first tokens of a process wait for was not found; since then
a case is begun and left before the first one counts. A streamed model under `attach()` was run there once,
with another greedy answer by our attention than by torch's in fp16 (a tiny random model); on the emulation
they agree, and a test that compares logits was not run there.

The hosts of these runs differed: where Python's launches are what takes long (the first token of 4,096
tokens), one was 1.7 times as fast as the other.

Not tried: other devices, other drivers, several GPUs in one host, that streams which share a pool of pages
wait for each other (tests see that they are asked to), engines (vLLM, SGLang) on a GPU, loads of
`kvclient-serve` on a GPU, a real 32B checkpoint.

Not written: wgmma for sm_90a, where the backend `cuda_sm90a` says so; sm_70, which nvcc 13 has not. Head
dimension 256 was tuned on no device.

Written since, and run on no GPU: layers of a streamed model that the host computes beside it
([streaming.md](streaming.md)). The row above was run before; the next one has two cases with them."""
NOTHING = "Nothing was run on a GPU yet: neither `pytest -m gpu` nor `bench.gpu`. Row by row:"


def document(result: dict[str, Any] | None) -> str:
    return f"{HEAD}\n{_run(result)}\n\n{OPEN}\n{_built()}"


def _built() -> str:
    record = gpu_build.RECORD
    if not record.exists():
        return ""
    return f"\n## What was compiled\n\n{gpu_build.words(json.loads(record.read_text()))}\n"


def _run(result: dict[str, Any] | None) -> str:
    if result is None:
        nothing = {"rows": {row.key: {"not measured": "no GPU so far"} for row in ROWS}}
        return f"{NOTHING}\n\n{sections(nothing)}"
    about, limits = result["machine"], result["ceilings"]
    machine = f"{about['device']} ({about['memory_gib']} GiB), torch {about['torch']}, CUDA {about['cuda']}"
    rates = [
        f"reading {limits['read_bytes_s'] / 1e9:,.0f} GB/s",
        f"copying {limits['copy_bytes_s'] / 1e9:,.0f} GB/s (read and written)",
        f"bf16 8192³ {limits['gemm_flop_s'] / 1e12:,.0f} TFLOP/s",
        f"pinned to device {limits['pinned_bytes_s'] / 1e9:,.1f} GB/s",
    ]
    run = f"Last run: {about['when']}, commit {about['commit'][:9]}, {result['seconds']} s.\nOn: {machine}."
    ceilings = "\n".join(f"- {rate}" for rate in rates)
    return f"{run}\nCeilings in the same run:\n\n{ceilings}\n\n{sections(result)}"


if __name__ == "__main__":
    main()
