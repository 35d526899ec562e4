"""The Triton twins compiled for a GPU that is not there: what `make triton` and the tests look at.

Owns the list of what is compiled. Never launches anything. Invariant: the signatures are those of
kvclient.kernels.triton_calls.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

from kvclient.kernels.triton_calls import SPLIT_ROWS, STAGES, tile_of

FLOATS = ("scale", "softcap")
SMALL = ("segments", "kv_heads", "group", "tokens", "window", "rotary_dim", "splits")
FLAGS = {"QUERY": 2, "CAUSAL": True, "INTERLEAVED": False, "TURNED": True, "PRECISION": "tf32x3"}


def variants() -> list[tuple[str, dict[str, Any]]]:
    """(kernel, its constants)."""
    found: list[tuple[str, dict[str, Any]]] = []
    for head_dim in (64, 128):
        for rows in (SPLIT_ROWS, 1024):
            block_m, block_n, block_d = tile_of(rows, head_dim)
            shape = {"D": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m}
            found.append(("attend_tile", {**shape, "BLOCK_N": block_n, **FLAGS}))
    found.append(("merge_tile", {**shape, "QUERY": 2}))
    for group in (0, 32, 128):
        for bits in (8, 4):
            shape = {"D": 128, "BLOCK_D": 128, "GROUP": group, "DTYPE": 2, "BITS": bits}
            found.append(("quantise_tile", shape))
    return found


def build(name: str, constants: dict[str, Any], capability: int) -> dict[str, Any]:
    """What was compiled, and how large it and its shared memory are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvclient.kernels import triton_tiles

    kernel = getattr(triton_tiles, name)
    signature = {**scalars(kernel), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", capability, 32)
    done = triton.compile(source, target=target, options={"num_stages": STAGES})
    sizes = {"cubin_bytes": len(done.asm["cubin"]), "shared_bytes": done.metadata.shared}
    return {"kernel": name, "capability": capability, **sizes, **constants}


def scalars(kernel: Any) -> dict[str, str]:
    """The types of a kernel's run-time arguments."""
    found = {}
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            found[name] = "fp32" if name in FLOATS else "i32" if name in SMALL else "i64"
    return found


def main() -> int:
    """Prints what each kernel compiles to, a line of JSON each; 0."""
    for capability in map(int, sys.argv[1:] or ["80", "90"]):
        for name, constants in variants():
            print(json.dumps(build(name, constants, capability)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
