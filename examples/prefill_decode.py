"""Prefill and decode on two hosts: two daemons that are peers, a process that prefills and one that decodes.

    python examples/prefill_decode.py

Prints the time to the first token on one host, apart, over a link on which the KV takes half as long as
computing it, and with the prefiller killed: at once, when nothing of the prompt is there, and half-way
through a prefill in chunks, of which the whole ones are used. The answers are compared. Both "hosts" are this
machine: network namespaces where this user may make them, else addresses of loopback, and then without the
slow link. So the times say what the handoff costs and not what a second machine gains.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hosts_here

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS, NEW, CHUNK = 1024, 16, 128


def attached(directory: str) -> Any:
    """(model, kv, inputs) on the daemon there; the same prompt everywhere."""
    import torch
    import transformers

    import kvclient
    import kvclient.hf
    from examples.model import ensure

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(ensure()).eval()
    kv = kvclient.hf.attach(model, kvclient.connect(dir=directory), self_test=False)
    ids = torch.arange(3, 3 + TOKENS).remainder(40000)[None]
    return model, kv, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def prefill(directory: str, pipe: Any) -> None:
    _, kv, inputs = attached(directory)
    pipe.send("ready")
    handoff = kv.handoff(**inputs, **pipe.recv())
    pipe.send(handoff.to_json())
    handoff.wait()
    pipe.send("done")
    pipe.recv()


def wait_up(directory: Path) -> None:
    for _ in range(200):
        asked = [sys.executable, "-m", "kvstored", "peers", "--dir", str(directory), "--json"]
        said = subprocess.run(asked, capture_output=True, text=True).stdout
        if said and all(peer["state"] == "up" for peer in json.loads(said)["peers"]):
            return
        time.sleep(0.05)
    raise SystemExit("the daemons do not reach each other")


def resumed(kv: Any, handoff: str, began: float) -> tuple[list[int], float]:
    """The answer, and seconds from `began` to its first token."""
    from kvclient.hf import Handoff

    entered = time.perf_counter()
    out = kv.resume(Handoff.from_json(handoff), max_new_tokens=NEW, do_sample=False)
    return out[0, TOKENS:].tolist(), entered - began + kv.last.ttft_s


def await_half(a: Path, kv: Any, inputs: dict[str, Any]) -> None:
    """Until half of the prompt's blocks are whole there."""
    import kvclient

    chain = kv.chunker.chain(kv.identity, inputs["input_ids"][0].tolist())
    deadline = time.monotonic() + 300
    with kvclient.connect(dir=str(a)) as client:
        while client.lookup(chain).resident < len(chain) // 2:
            if time.monotonic() > deadline:
                raise TimeoutError("half of the prompt was not there after 300 s")
            time.sleep(0.001)


def apart(a: Path, kv: Any, inputs: dict[str, Any], kill: str) -> tuple[list[int], float]:
    """kill: "", or when the prefiller is."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(str(a), there))
    process.start()
    try:
        assert here.recv() == "ready"
        began = time.perf_counter()
        here.send({"prefill_chunk_size": CHUNK} if kill == "half-way" else {})
        handoff = here.recv()
        if kill == "half-way":
            await_half(a, kv, inputs)
        if kill:
            process.kill()
        found = resumed(kv, handoff, began)
        if not kill:
            here.recv()
            here.send("end")
        return found
    finally:
        process.join()


def flush(hosts: dict[str, hosts_here.Host]) -> None:
    for host in hosts.values():
        asked = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(host.dir)]
        subprocess.run(asked, check=True, stdout=subprocess.DEVNULL)


def fetched_bytes(host: hosts_here.Host) -> int:
    return int(host.peers()["a"]["fetch_bytes"])


def show(hosts: dict[str, hosts_here.Host], kv: Any, model: Any, inputs: Any) -> None:
    a, network = hosts["a"], hosts["a"].network
    with kv.bypass():
        began = time.perf_counter()
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
        alone_s = time.perf_counter() - began
        plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, TOKENS:].tolist()

    def row(name: str, kill: str = "") -> None:
        flush(hosts)
        tokens, first_s = apart(a.dir, kv, inputs, kill)
        same = "yes" if tokens == plain else "NO"
        print(f"{name:28}{first_s:>10.2f} s  {kv.last.reused_tokens:>7}  {same}")

    print(f"{'':28}{'first token':>12}  {'reused':>7}  same answer")
    print(f"{'one host, without a store':28}{alone_s:>10.2f} s  {0:>7}  -")
    before = fetched_bytes(hosts["b"])
    row("prefilled apart")
    moved = fetched_bytes(hosts["b"]) - before
    if network.isolated:
        network.slow("a", 2 * moved / alone_s)
        row("over a slow link")
        network.slow("a", 10e9)
    else:
        print(f"{'over a slow link':28}not shown: {network.why}")
    for when in ("at once", "half-way"):
        row(f"prefiller killed {when}", kill=when)


def main() -> None:
    with hosts_here.running("a", "b") as hosts:
        for host in hosts.values():
            wait_up(host.dir)
        model, kv, inputs = attached(str(hosts["b"].dir))
        show(hosts, kv, model, inputs)
        kv.detach()
        kv.client.close()


if __name__ == "__main__":
    main()
