"""Prefill and decode on two hosts: two daemons that are peers, a process that prefills and one that decodes.

    python examples/prefill_decode.py

Prints the time to the first token on one host, apart, and with the prefiller killed half-way; the answers are
compared. Both "hosts" are addresses of this machine's loopback, so the times say what the handoff costs and
not what a second machine gains.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS, NEW = 1024, 16


def attached(directory: str) -> Any:
    """(model, kv, inputs) on the daemon there; the same prompt everywhere."""
    import torch
    import transformers

    import kvclient
    import kvclient.hf
    from examples.model import ensure

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(ensure()).eval()
    kv = kvclient.hf.attach(model, kvclient.connect(dir=directory), self_test=False)
    ids = torch.arange(3, 3 + TOKENS).remainder(40000)[None]
    return model, kv, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def prefill(directory: str, pipe: Any) -> None:
    _, kv, inputs = attached(directory)
    pipe.send("ready")
    pipe.recv()
    handoff = kv.handoff(**inputs)
    pipe.send(handoff.to_json())
    handoff.wait()
    pipe.send("done")
    pipe.recv()


def start(base: Path, name: str, at: str, peer: str) -> subprocess.Popen[bytes]:
    directory = base / name
    directory.mkdir()
    ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ready.bind(str(base / f"{name}.ready"))
    ready.settimeout(60)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "kvstored", "serve", "--dir", str(directory), "--memory", "256MiB",
         "--discard", "--node", name, "--listen", at, "--peer", peer,
         "--namespaces", f"default:salt=file:{base}/salt:share=read"],
        env={**os.environ, "NOTIFY_SOCKET": str(base / f"{name}.ready")},
        cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ready.recv(4096)
    return daemon


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def apart(a: Path, kv: Any, kill: bool) -> tuple[list[int], float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(str(a), there))
    process.start()
    try:
        assert here.recv() == "ready"
        began = time.perf_counter()
        here.send("go")
        handoff = here.recv()
        if kill:
            process.kill()
        found = resumed(kv, handoff, began)
        if not kill:
            here.recv()
            here.send("end")
        return found
    finally:
        process.join()


def main() -> None:
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-apart-")))
        (base / "salt").write_text("both hosts have this file")
        (base / "salt").chmod(0o600)
        first, second = f"127.0.0.1:{free_port()}", f"127.0.0.2:{free_port()}"
        for name, at, peer in (("a", first, f"b={second}"), ("b", second, f"a={first}")):
            daemon = start(base, name, at, peer)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        wait_up(base / "a")
        wait_up(base / "b")
        model, kv, inputs = attached(str(base / "b"))
        with kv.bypass():
            began = time.perf_counter()
            model.generate(**inputs, max_new_tokens=1, do_sample=False)
            alone_s = time.perf_counter() - began
            plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, TOKENS:].tolist()
        print(f"{'':28}{'first token':>12}  {'reused':>7}  same answer")
        print(f"{'one host, without a store':28}{alone_s:>10.2f} s  {0:>7}  -")
        for name, kill in (("prefilled apart", False), ("prefiller killed", True)):
            for directory in ("a", "b"):
                flush = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(base / directory)]
                subprocess.run(flush, check=True, stdout=subprocess.DEVNULL)
            tokens, first_s = apart(base / "a", kv, kill)
            same = "yes" if tokens == plain else "NO"
            print(f"{name:28}{first_s:>10.2f} s  {kv.last.reused_tokens:>7}  {same}")
        kv.detach()
        kv.client.close()


if __name__ == "__main__":
    main()
