"""The rows of bench.streaming: what each measures, and its table.

Owns what one row has measured that another needs (the disk's rate, a plain run under a limit). Never runs two
things at one time. Invariant: a row can be had alone, and then measures all that it is compared with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.install import ROOT, airllm_tree, progress, python_environment
from bench.streaming.dense import ensure_dense
from bench.streaming.limited import Fio, forget, run
from bench.streaming.model import HIDDEN, VOCABULARY
from kvclient.hf.streaming.residency import free_memory

LLAMA = ["xllamacpp==2026.10.11549", "gguf==0.19.0"]
PREFILL_TOKENS = 512
FIRST_PROMPTS = (4, 35)
EMBEDDING_BYTES = 2 * VOCABULARY * HIDDEN
RESIDENT_BYTES = 7 << 30  # what has to be free for a row with everything in memory


class Measured:
    """home: of the packed checkpoint, rearranged."""

    def __init__(self, home: Path, args: argparse.Namespace) -> None:
        self.home, self.args = home, args
        self.file = home / "kvstored-streaming.bin"
        self._plain: dict[float, dict] = {}
        self._fio: Fio | None = None

    def ours(self, gib: float | None, *more: str, tokens: int | None = None) -> dict:
        limit = None if gib is None else int(gib * (1 << 30))
        asked = ["ours", str(self.home), *(["--most", str(limit)] if limit else []), *more]
        return self.run(sys.executable, asked, limit, tokens)

    def run(self, python: str, asked: list[str], limit: int | None, tokens: int | None = None) -> dict:
        count = ["--tokens", str(self.args.tokens if tokens is None else tokens)]
        command = [python, "-m", "bench.streaming.run", *asked, *count, "--threads", str(self.args.threads)]
        return run(command, limit, self.args.patience)

    def plain(self, gib: float) -> dict:
        """One token a pass, under that limit; measured once."""
        if gib not in self._plain:
            progress(f"{gib:g} GiB: plain")
            self._plain[gib] = self.ours(gib)
        return self._plain[gib]

    def fio(self) -> float | None:
        """The disk's rate now; None: there is no fio."""
        try:
            self._fio = self._fio or Fio()
            return self._fio.rate(self.file)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            progress(f"no fio: {error}")
            return None

    def weights(self) -> int:
        """Bytes of layers and head."""
        return self.file.stat().st_size - EMBEDDING_BYTES


def each_limit(measure: Callable[[Measured, float], dict]) -> Callable[[Measured], list[dict]]:
    return lambda on: [{"limit_gib": gib, **measure(on, gib)} for gib in on.args.limits]


# ---------------------------------------------------------------- ours under a limit


def decode(on: Measured, gib: float) -> dict:
    runs, disk = [], []
    for _ in range(on.args.rounds):
        disk.append(on.fio())
        progress(f"{gib:g} GiB: plain")
        runs.append(on.ours(gib))
    disk.append(on.fio())
    if good := [found for found in runs if "absent" not in found]:
        on._plain[gib] = good[0]
    return {"plain": runs, "fio": [rate for rate in disk if rate is not None]}


def decode_table(rows: list[dict]) -> list[str]:
    lines = ["| limit | held / read a token | tokens/s | bytes/s ÷ fio | peak |", "|---|---|---|---|---|"]
    for row in rows:
        good = [found for found in row["plain"] if "absent" not in found]
        if not good:
            lines.append(f"| {row['limit_gib']:g} GiB | {row['plain'][0]['absent']} | | | |")
            continue
        rate = median(found["tokens_per_s"] for found in good)
        held, moved = good[0]["bytes_held"] / 2**20, good[0]["bytes_per_pass"] / 2**20
        disk = median(row["fio"]) if row["fio"] else None
        share = median(found["bytes_per_s"] for found in good) / disk if disk and moved else None
        peak = max((found["peak"] or 0) for found in good) / 2**20
        cells = [f"{row['limit_gib']:g} GiB", f"{held:,.0f} / {moved:,.0f} MiB", f"{rate:.2f}"]
        cells += [f"{share:.2f} of {disk / 1e9:.2f} GB/s" if share else "-", f"{peak:,.0f} MiB"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def drafted(kind: str) -> Callable[[Measured, float], dict]:
    def measure(on: Measured, gib: float) -> dict:
        disk = on.fio()
        progress(f"{gib:g} GiB: drafts by {kind}")
        found = on.ours(gib, "--draft", kind, tokens=8 * on.args.tokens)
        return {"drafted": found, "fio": disk, "plain": on.plain(gib)}

    return measure


def drafted_table(rows: list[dict]) -> list[str]:
    lines = ["| limit | tokens/s | tokens a pass | ÷ one token a pass | ÷ the disk's ceiling for that |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        found, plain = row["drafted"], row["plain"]
        if "absent" in found:
            lines.append(f"| {row['limit_gib']:g} GiB | {found['absent']} | | | |")
            continue
        rate, moved = found["tokens_per_s"], found["bytes_per_pass"]
        times = f"{rate / plain['tokens_per_s']:.1f} ×" if "absent" not in plain else plain["absent"]
        most = row["fio"] / moved if row["fio"] and moved else None
        ceiling = f"{rate / most:.1f} × of {most:.2f}/s" if most else "-"
        cells = [
            f"{row['limit_gib']:g} GiB",
            f"{rate:.2f}",
            f"{found['tokens_per_pass']:.1f}",
            times,
            ceiling,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def first(on: Measured, gib: float) -> dict:
    found = {}
    for tokens in FIRST_PROMPTS:
        progress(f"{gib:g} GiB: first token of {tokens}")
        found[tokens] = on.ours(gib, "--prompt-tokens", str(tokens))
        asked = ["bare", str(on.home), "--stay", str(found[tokens].get("stay", 0))]
        found[tokens]["bare"] = on.run(sys.executable, asked, int(gib * (1 << 30)))
    return {"first": found, "weights": on.weights()}


def first_table(rows: list[dict]) -> list[str]:
    """A pass over the weights: all of them, at the rate at which that run's later tokens read theirs; beside
    it a bare one into memory that nobody has touched before.
    """
    lines = ["| limit, prompt | loaded + first token | until all that stays is there | processor | "
             "a pass; a bare one | times |"]  # fmt: skip
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        for tokens, found in row["first"].items():
            name = f"{row['limit_gib']:g} GiB, {tokens}"
            if "filling_bytes_per_s" not in found:
                lines.append(f"| {name} | {found.get('absent', 'nothing is read')} | | | | |")
                continue
            began, whole_s = (
                found["loaded_s"] + found["first_s"],
                row["weights"] / found["filling_bytes_per_s"],
            )
            cells = [
                name,
                f"{found['loaded_s']:.2f} + {found['first_s']:.2f} s",
                f"{found['settled_s']:.2f} s",
                f"{found['first_cpu_s']:.2f} s",
            ]
            bare = found["bare"].get("first_s")
            cells += [f"{whole_s:.2f} s; {f'{bare:.2f} s' if bare else found['bare'].get('absent', '-')}"]
            cells += [f"{began / whole_s:.2f}" + (f"; {began / bare:.2f}" if bare else "")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


# ---------------------------------------------------------------- without a limit


def prefill(on: Measured) -> dict:
    progress(f"products of {PREFILL_TOKENS} rows")
    return on.run(sys.executable, ["prefill", "--prompt-tokens", str(PREFILL_TOKENS)], None)


def prefill_table(found: dict) -> list[str]:
    if "absent" in found:
        return [f"prefill: {found['absent']}"]
    lines = [f"| {found['rows']} rows, one layer's products | packed | torch, bf16 | share of torch's rate |"]
    lines.append("|---|---|---|---|")
    for i, what in enumerate(("seconds", "seconds of processor")):
        ours, theirs = (found["layer"][side][i] for side in ("packed", "numbers"))
        lines.append(f"| {what} | {ours:.3f} | {theirs:.3f} | {theirs / ours:.2f} |")
    return lines


def resident(on: Measured) -> dict:
    if free_memory() < RESIDENT_BYTES:
        return {"ours": {"absent": f"less than {RESIDENT_BYTES >> 30} GiB are free"}}
    progress("everything resident")
    found = {"bandwidth": on.run(sys.executable, ["bandwidth"], None), "weights": on.weights()}
    prompt = ("--prompt-tokens", str(PREFILL_TOKENS))
    found["ours"] = on.ours(None, "--residency", "full_resident", *prompt)
    forget(on.file)
    progress("llama.cpp, everything resident")
    return found | {"llama": _llama(on, None, *prompt)}


def resident_table(found: dict) -> list[str]:
    ours, llama = found["ours"], found.get("llama", {})
    if "absent" in ours:
        return [f"resident: {ours['absent']}"]
    rate, most = ours["tokens_per_s"], found["bandwidth"].get("bytes_per_s")
    lines = ["| everything resident | ours | llama.cpp, Q4_0 |", "|---|---|---|"]
    reason = llama.get("absent")
    theirs = [reason, ""] if reason else [f"{llama[name]:.2f}" for name in ("tokens_per_s", "prompt_per_s")]
    prompt = PREFILL_TOKENS / ours["first_s"]
    lines.append(f"| decode, tokens/s | {rate:.2f} | {theirs[0]} |")
    lines.append(f"| prompt of {PREFILL_TOKENS}, tokens/s | {prompt:.1f} | {theirs[1]} |")
    if most:
        share = rate * found["weights"] / most
        lines.append(f"| bytes of weights a second ÷ {most / 1e9:.1f} GB/s | {share:.2f} | |")
    return lines


# ---------------------------------------------------------------- other programs


def _llama(on: Measured, limit: int | None, *more: str) -> dict:
    try:
        python = python_environment("xllamacpp", LLAMA)
        made = "from bench.streaming.model import ensure_gguf; print(ensure_gguf())"
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([python, "-c", made], env=env, capture_output=True, text=True, check=True)
        path = Path(done.stdout.strip().splitlines()[-1])
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return {"absent": f"not installed: {str(error)[:120]}"}
    forget(path)
    most = ["--most", str(limit)] if limit else []
    return on.run(python, ["llama", str(path), *most, *more], limit)


def llama(on: Measured, gib: float) -> dict:
    plain = on.plain(gib)
    progress(f"{gib:g} GiB: llama.cpp")
    return {"plain": plain, "other": _llama(on, int(gib * (1 << 30)), "--prompt-tokens", "4")}


def dense(who: str) -> Callable[[Measured, float], dict]:
    """In bf16, one token: 15 GB are read for each."""

    def measure(on: Measured, gib: float) -> dict:
        plain, home = on.plain(gib), ensure_dense(on.home)
        forget(*home.glob("*.safetensors"))
        if who == "airllm":
            try:
                os.environ["PYTHONPATH"] = airllm_tree()
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                return {"plain": plain, "other": {"absent": f"not installed: {str(error)[:120]}"}}
        progress(f"{gib:g} GiB: {who}")
        asked = [who, str(home), "--prompt-tokens", "4"]
        return {"plain": plain, "other": on.run(sys.executable, asked, int(gib * (1 << 30)), tokens=1)}

    return measure


def other_table(rows: list[dict]) -> list[str]:
    lines = ["| limit | ours, tokens/s | theirs | times | their peak |", "|---|---|---|---|---|"]
    for row in rows:
        plain, other = row["plain"], row["other"]
        rate = plain.get("tokens_per_s")
        cells = [f"{row['limit_gib']:g} GiB", f"{rate:.2f}" if rate else plain["absent"]]
        there = other.get("tokens_per_s")
        cells += [f"{there:.3f}" if there else other.get("absent", "no rate")]
        cells += [f"{rate / there:.1f} ×" if rate and there else "-"]
        cells += [f"{other['peak'] / 2**20:,.0f} MiB" if other.get("peak") else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# What is measured, its table, and what it is, by the row's name.
ROWS: dict[str, tuple[Callable, Callable, str]] = {
    "decode": (each_limit(decode), decode_table, "one token a pass, beside fio"),
    "lookup": (each_limit(drafted("lookup")), drafted_table, "drafts by look-up in the text, which repeats"),
    "draft": (
        each_limit(drafted("model")),
        drafted_table,
        "drafts by a model of 0.5B, right for 3 of 4 tokens",
    ),
    "first": (each_limit(first), first_table, "the first token after start"),
    "prefill": (prefill, prefill_table, "many rows, beside torch's bf16 products"),
    "resident": (resident, resident_table, "everything in memory, beside llama.cpp"),
    "llama": (each_limit(llama), other_table, "llama.cpp, Q4_0, mmap, under the same limit"),
    "accelerate": (
        each_limit(dense("accelerate")),
        other_table,
        "accelerate's disk offload, bf16: 15 GB more",
    ),
    "airllm": (each_limit(dense("airllm")), other_table, "AirLLM 4.0.0, bf16: the same 15 GB"),
}
