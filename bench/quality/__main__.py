"""How near the answer stays when what is reused is no prefix, on texts that nothing was tuned to.

    python -m bench.quality [--half reporting] [--pairs 40] [--moved 14] [--short] [--dtype bfloat16]
                            [--model gemma3] [--max-kl 5e-3] [--json FILE] [--plot FILE.png]

`repair="auto"`, one thread. So many swapped pairs, and documents moved of either kind (bench.quality.cases),
three questions each; KL in nats at the 32 tokens of the answer, mean over them, to a cold run of the same
tokens. Cut off and started again with the same file it goes on. What is tuned is tuned with --half tuning.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from bench.quality.cases import KINDS, QUESTIONS
from bench.quality.measure import Subject, measured
from bench.quality.texts import HALVES, digest, found


def table(rows: list[dict[str, Any]], max_kl: float) -> str:
    """Markdown: a line for each kind, and one for all."""
    lines = [
        "| kind, prompts | KL mean, median, worst | CPU / cold | computed anew | more than twice max_kl |",
        "|---|---|---|---|---|",
    ]
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        chosen = [row for row in rows if kind in (row["kind"], "all")]
        kl = [row["kl"] for row in chosen]
        share = sum(row["recomputed"] for row in chosen) / max(1, sum(row["found"] for row in chosen))
        beyond = sum(value > 2 * max_kl for value in kl)
        cpu = mean(row["cpu_to_cold"] for row in chosen)
        lines.append(
            f"| {kind}, {len(chosen)} | {mean(kl):.1e}, {median(kl):.1e}, {max(kl):.1e} | {cpu:.2f} | "
            f"{share:.0%} | {beyond} ({beyond / len(chosen):.1%}) |"
        )
    kept = [row for row in rows if row["recomputed"] < row["found"]]
    for name, chosen in (("all", rows), ("those that kept stored tokens", kept)):
        if spreads := [row["spread"] for row in chosen if "spread" in row]:
            kl = mean(row["kl"] for row in chosen)
            said = f"{kl:.1e}, {kl / mean(spreads):.2f} times the {mean(spreads):.1e} of two correct runs"
            lines.append(f"\n{name}, {len(chosen)}: {said}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], max_kl: float, path: Path) -> None:
    """A histogram of KL by kind, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    edges = [10 ** (-6 + i / 4) for i in range(21)]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    kept = [[max(row["kl"], edges[0]) for row in rows if row["kind"] == kind] for kind in kinds]
    axes.hist(kept, bins=edges, stacked=True, label=kinds)
    axes.axvline(max_kl, color="black", linewidth=1, label="max_kl")
    axes.axvline(2 * max_kl, color="black", linewidth=1, linestyle=":", label="twice that")
    axes.set(xscale="log", xlabel="KL of the answer to a cold run, nats", ylabel="prompts")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", choices=HALVES, default="reporting")
    parser.add_argument("--pairs", type=int, default=40, help="of documents that are swapped")
    parser.add_argument("--moved", type=int, default=14, help="documents, of either kind")
    parser.add_argument("--short", action="store_true", help="moved ones of 250 to 500 tokens")
    parser.add_argument("--model", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-kl", type=float, default=5e-3)
    parser.add_argument("--json", type=Path, help="a line for each prompt; a run goes on there")
    parser.add_argument("--plot", type=Path, help="a PNG of the histogram")
    chosen = parser.parse_args()
    if chosen.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: no matplotlib here (dependency group plots)")  # before an hour of measuring
    texts = found(chosen.half)
    print(f"{len(texts)} texts of the {chosen.half} half, digest {digest(texts)}", file=sys.stderr)
    subject = Subject(chosen.dtype, chosen.max_kl, chosen.model)
    counts = {kind: chosen.pairs if kind == "swapped" else chosen.moved for kind in KINDS}
    path = chosen.json or Path(f"quality-{chosen.half}-{chosen.model}-{chosen.dtype}.jsonl")
    rows = measured(
        subject, texts, counts, path, chosen.short, lambda text: print(text, file=sys.stderr, flush=True)
    )
    what = f"{chosen.model}, {chosen.dtype}, max_kl {chosen.max_kl:g}"
    print(f"{len(rows)} prompts, {len(rows) // QUESTIONS} cases, {what}\n")
    print(table(rows, chosen.max_kl))
    if chosen.plot:
        plot(rows, chosen.max_kl, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
