"""Prefill on one host, decode on another, over a link that takes half as long as the prefill: what the
transfer adds to the time to the first token.

Hosts are network namespaces; the link is tbf's. The model, the prompt and the two processes are those of
`examples/prefill_decode.py`, a thread each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import hosts_here
import prefill_decode

MOST_ROUNDS = 3


def first_token_alone(model: Any, kv: Any, inputs: Any) -> float:
    """Seconds, without a store."""
    with kv.bypass():
        began = time.perf_counter()
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
        return time.perf_counter() - began


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """One row, or none where this machine has no namespaces."""
    with hosts_here.running("a", "b", memory="256MiB", tls=False) as hosts:
        if not hosts["a"].network.isolated:
            print(f"prefill apart: not measured, {hosts['a'].network.why}")
            return
        prefill_decode.wait_up(hosts["b"].dir)
        model, kv, inputs = prefill_decode.attached(str(hosts["b"].dir))
        took: dict[str, list[float]] = {"alone": [], "apart": [], "apart, slow": []}
        transfer_s = []
        for _ in range(min(rounds, MOST_ROUNDS)):
            hosts["a"].network.slow("a", 10e9)
            took["alone"].append(first_token_alone(model, kv, inputs))
            prefill_decode.flush(hosts)
            before = prefill_decode.fetched_bytes(hosts["b"])
            took["apart"].append(prefill_decode.apart(hosts["a"].dir, kv, inputs, "")[1])
            moved = prefill_decode.fetched_bytes(hosts["b"]) - before
            transfer_s.append(took["alone"][-1] / 2)
            hosts["a"].network.slow("a", moved / transfer_s[-1])
            prefill_decode.flush(hosts)
            took["apart, slow"].append(prefill_decode.apart(hosts["a"].dir, kv, inputs, "")[1])
        kv.detach()
        kv.client.close()
    middle = {name: statistics.median(seconds) for name, seconds in took.items()}
    added_s = statistics.median(
        slow - alone for slow, alone in zip(took["apart, slow"], took["alone"], strict=True)
    )
    yield {
        "what": "prefill apart: what a transfer of half the prefill's time adds to the first token",
        "reach": "<= 10 % of the transfer",
        "us": {name: round(seconds * 1e6) for name, seconds in middle.items()},
        "percent_of_the_transfer": round(100 * added_s / statistics.median(transfer_s), 1),
    }
