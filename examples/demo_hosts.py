"""A prompt through three hosts: what one computed the others find, also when hosts are killed and frozen.

    python examples/demo_hosts.py

Three daemons, a, b and c, each in a network namespace of its own where this user may make one, speak TLS. A
process on each runs SmolLM2 and is asked the same question about the same document:

    a  computes it                                b  takes a's blocks over the network
    c  is asked when a is killed: takes b's       a  is back and has it: its pool was kept
    c  is flushed, and b frozen: hears nothing of b for 1.5 s at most and takes a's
    c  is flushed, a and b killed: computes

Then three others with a pool across them: etcd and Mooncake from packages (`.ci/cluster` unpacks them; the
fabric has no TLS). What b computed and was asked for again lies in it, and c has it after b is killed. Where
a machine cannot have one, it says why.

Prints tables and ends everything. The exit status is 0 only if every answer was that of a plain generate().
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import cluster_here
import hosts_here
import model as example_model

NEW_TOKENS, DOCUMENT_CHARACTERS, UP_S = 16, 2800, 30.0
TAILS = 2  # blocks of the last tokens, which another prompt would not ask for again


def work(model_dir: str, home: str) -> None:
    """On a host: answers what a line asks, until there is none. A line is "flush" or a prompt, as JSON."""
    import torch
    import transformers

    import kvclient
    import kvclient.hf

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    with kvclient.connect(dir=home, on_error="miss") as client:
        kv = kvclient.hf.attach(model, client, self_test=False)
        print("ready", flush=True)
        for line in sys.stdin:
            prompt = json.loads(line)
            inputs = tokenizer(prompt["text"], return_tensors="pt")
            began = time.perf_counter()
            if prompt["plain"]:
                with kv.bypass():
                    out = model.generate(**inputs, **asked)
            else:
                out = model.generate(**inputs, **asked)
            count = inputs["input_ids"].shape[1]
            said = {"tokens": out[0, count:].tolist(), "prompt": count, "all_s": time.perf_counter() - began}
            if not prompt["plain"]:
                said |= {"reused": kv.last.reused_tokens, "ttft_s": kv.last.ttft_s}
                said["blocks"] = client.stats()["blocks"]
            print(json.dumps(said), flush=True)
        kv.detach()


class Process:
    """A process on a host that has the model."""

    def __init__(self, host: hosts_here.Host, model_dir: str) -> None:
        command = [*host.network.inside(host.name), sys.executable, __file__, "work", model_dir]
        command.append(str(host.dir))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self._process.wait()}")
        return line

    def ready(self) -> None:
        while self._line() != "ready\n":
            pass

    def ask(self, text: str, plain: bool = False) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"text": text, "plain": plain}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def processes(hosts: dict[str, hosts_here.Host]) -> Iterator[dict[str, Process]]:
    made = {name: Process(host, str(example_model.ensure())) for name, host in hosts.items()}
    try:
        for host in made.values():
            host.ready()
        yield made
    finally:
        for host in made.values():
            host.end()


def wait_up(host: hosts_here.Host, *others: str) -> None:
    end = time.monotonic() + UP_S
    while not all(host.peers().get(other, {}).get("state") == "up" for other in others):
        if time.monotonic() > end:
            raise SystemExit(f"{host.name} does not reach {others}: {host.peers()}")
        time.sleep(0.05)


def flush(host: hosts_here.Host) -> None:
    command = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(host.dir)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Table:
    """Who was asked, and what it said. `right`: every answer was that of a plain generate()."""

    def __init__(self, hosts: dict[str, hosts_here.Host], at: dict[str, Process], text: str) -> None:
        self.right, self._hosts, self._at, self._text = True, hosts, at, text
        self._plain = at["a"].ask(text, plain=True)
        count, seconds = self._plain["prompt"], self._plain["all_s"]
        print(f"\n{count} tokens of prompt; a plain generate() takes {seconds:.2f} s\n")
        print(f"{'':48}{'first token':>12}{'reused':>8}  from    same answer")

    def _fetched(self, name: str) -> dict[str, int]:
        return {peer: figures["fetched"] for peer, figures in self._hosts[name].peers().items()}

    def ask(self, name: str, what: str) -> dict[str, Any]:
        before = self._fetched(name)
        said = self._at[name].ask(self._text)
        after = self._fetched(name)
        taken = "+".join(peer for peer in after if after[peer] > before.get(peer, 0)) or "-"
        same = said["tokens"] == self._plain["tokens"]
        self.right &= same
        told = f"{name}  {what:45}{said['ttft_s']:>10.2f} s{said['reused']:>8}  {taken:6}"
        print(f"{told}  {'yes' if same else 'NO'}")
        return said


def pool(text: str) -> bool:
    """Three hosts with a pool, where this machine can have them; whether every answer was right."""
    try:
        with cluster_here.running("a", "b", "c", memory="192MiB", pool="128MiB") as hosts:
            host = {name: hosts[name] for name in "abc"}
            with processes(host) as at:
                print("\nhosts with a pool: etcd and Mooncake's master are on a")
                table = Table(host, at, text)
                table.ask("b", "nobody has it: computes")
                blocks = table.ask("b", "again: in its own memory")["blocks"]
                cluster_here.until(
                    lambda: cluster_here.told(host["b"])["counters"].get("puts", 0) >= blocks - TAILS,
                    "its blocks are in the pool",
                )
                host["b"].kill()
                table.ask("c", "b is killed, the pool has it")
                return table.right
    except cluster_here.NotHere as why:
        print(f"\nno pool here: {why}")
        return True


def main() -> int:
    text = topics["objects"][:DOCUMENT_CHARACTERS] + "\nIn one sentence, what is an object?"
    with hosts_here.running("a", "b", "c") as hosts, processes(hosts) as at:
        network = hosts["a"].network
        where = "network namespaces" if network.isolated else f"loopback addresses ({network.why})"
        print("hosts are", where)
        for name, host in hosts.items():
            wait_up(host, *(other for other in hosts if other != name))
        table = Table(hosts, at, text)
        ask = table.ask
        ask("a", "nobody has it: computes")
        ask("b", "a has it")
        ask("b", "again: in its own memory")
        hosts["a"].kill()
        ask("c", "a is killed, b has it")
        hosts["a"].start()
        wait_up(hosts["a"], "b", "c")
        ask("a", "a is back, its pool was kept")
        flush(hosts["c"])
        wait_up(hosts["c"], "a", "b")
        hosts["b"].freeze()
        ask("c", "c is flushed, b frozen, a has it")
        hosts["b"].thaw()
        for name in ("a", "b"):
            hosts[name].kill()
        flush(hosts["c"])
        ask("c", "c is flushed, a and b killed: computes")
    right = pool(text) and table.right
    print("\nall as expected" if right else "\nNOT as expected", "- everything ended")
    return 0 if right else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:4])
    else:
        sys.exit(main())
