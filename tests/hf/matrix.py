"""Prints which architectures are served, exactly and inside prompts, as docs/reuse.md has it.

    python -m tests.hf.matrix      # between the markers of the document; test_matrix.py compares
"""

from __future__ import annotations

import transformers

from kvclient.hf.model.structure import Refused, check_structure
from kvclient.hf.reuse.eligibility import examine_non_prefix
from kvclient.hf.reuse.repair import Repair
from tests.hf.zoo import COMPRESSED, INDEXED, LATENT, MOVED, RECURRENT, REFUSED, SERVED, WINDOWED, build


def rows() -> list[str]:
    out = [
        f"| architecture (transformers {transformers.__version__}) | prefixes | inside prompts |",
        "|---|---|---|",
    ]
    for name in (*SERVED, *MOVED, *LATENT, *INDEXED, *COMPRESSED, *WINDOWED, *RECURRENT, *REFUSED):
        model = build(name)
        if model is not None:
            out.append(f"| {name} | {' | '.join(_row(model))} |")
    return out


def _row(model) -> tuple[str, str]:
    try:
        kv = check_structure(model)
    except Refused as refused:
        return f"refused: {_reason(refused, model)}", "refused"
    try:
        non_prefix = examine_non_prefix(model, kv, Repair())
    except Refused as refused:
        return "exact", f"refused: {_reason(refused, model)}"
    head_dim = kv.groups[0].head_dim if kv.main == () else kv.head_dim
    return "exact", f"approximate; {_convention(non_prefix.rope, head_dim)}"


def _convention(rope, head_dim: int) -> str:
    turned = [layer for layer in rope.layers if layer.inv_freq is not None]
    if not turned:
        return "keys hang on no position"
    words = "keys turn by " + {"half": "halves", "interleaved": "pairs"}[turned[0].convention]
    if 2 * len(turned[0].inv_freq) < head_dim:
        words += f", {2 * len(turned[0].inv_freq)} of {head_dim} elements"
    if len(turned) < len(rope.layers):
        words += f", {len(rope.layers) - len(turned)} of {len(rope.layers)} layers not at all"
    return words


def _reason(refused: Refused, model) -> str:
    return str(refused).removeprefix(type(model).__name__).lstrip(" :")


if __name__ == "__main__":
    print("\n".join(rows()))
