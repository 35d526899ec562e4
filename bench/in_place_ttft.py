"""Time to the first token when attention reads the blocks where they lie. `python -m bench.in_place_ttft`

SmolLM2 and a real text, shared tokens and a tail of 20, all contenders alternating, CPU time of the process
on one thread, medians:
  floor     plain generate(), handed the exact KV of the prefix in memory, by reference: no store can be
            faster that copies
  dense     the store attached with in_place=False; the prefix is copied out of its blocks
  in place  the store attached with in_place=True, as it is by default
Owns nothing that lasts; never judges.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from bench.reuse_ttft import TAIL_TOKENS, Contenders, daemon, load


def measure(dense: Contenders, in_place: Contenders, ids: list[int], shared: int, rounds: int) -> dict:
    import torch

    prompt = torch.tensor([ids[: shared + TAIL_TOKENS]])
    for contender in (dense, in_place):
        contender.stored(prompt)  # publishes
    layers = dense.prefix_of(prompt, shared // 128 * 128)
    calls = {
        "floor": lambda: dense.floor(prompt, layers),
        "dense": lambda: dense.stored(prompt),
        "in place": lambda: in_place.stored(prompt),
    }
    taken: dict[str, list] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            cpu, _, token = call()
            if number:
                taken[name].append((cpu, token))
    tokens = {token for runs in taken.values() for _, token in runs}
    return {
        "shared": shared,
        "reused": in_place.kv.last.reused_tokens,
        "one_token": len(tokens) == 1,
        **{name: median(cpu for cpu, _ in runs) for name, runs in taken.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.in_place_ttft", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    import kvclient
    from kvclient.hf import attention

    results = []
    with daemon() as home, kvclient.connect(dir=home) as client:
        model, ids = load(args.dtype)
        twin, _ = load(args.dtype)
        dense = Contenders(model, client, in_place=False)
        in_place = Contenders(twin, client, in_place=True)
        for shared in (512, 2048):
            results.append(measure(dense, in_place, ids, shared, args.rounds))
            row = results[-1]
            ours, floor, copied = (row[name] * 1e3 for name in ("in place", "floor", "dense"))
            print(
                f"{args.dtype}, {shared} shared tokens, {in_place.kv.backend}, CPU: in place {ours:.1f} ms,",
                end=" ",
            )
            print(
                f"floor of the dense path {floor:.1f}, dense path {copied:.1f}: "
                f"{ours / floor:.2f} × the floor"
            )
    if args.json:
        args.json.write_text(
            json.dumps({"rows": results, "fallbacks": attention.fallbacks()}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
