"""The main job on a real model: one process computes, the others find it in shared memory.

Starts a daemon in a temporary directory and four inference processes with SmolLM2, has them ask about
chapters of Python's reference, and prints what happened. Ends everything it started. The exit status is 0
only if every expectation held.

    first    computes a document nobody has computed
    second   asks something else about it; third asks the same as first
    second   joins while first is still computing another document, and takes it layer by layer
    doomed   is killed while it computes a third; third, which had joined it, carries on alone
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pydoc_data.topics import topics

import model as example_model
import own_daemon

HERE = pathlib.Path(__file__).resolve().parent
MEMORY = "512MiB"
NEW_TOKENS = 24
DOCUMENT_CHARACTERS = 2800  # 500 to 900 tokens
BLOCK_TOKENS = 128
HALF_WAY = 12  # the layer of 30 behind which the doomed process is killed
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 300.0


class Failed(Exception):
    """The demo cannot go on; the text says why."""


class Worker:
    """One inference process."""

    def __init__(self, name: str, model_dir: pathlib.Path, home: pathlib.Path) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "demo_worker.py"), str(model_dir), str(home)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, document: str, question: str, **options: object) -> None:
        command = {"document": document, "question": question, "new_tokens": NEW_TOKENS, **options}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict:
        try:
            line = self.lines.get(timeout=timeout_s)
        except queue.Empty:
            raise Failed(f"{self.name} did not answer within {timeout_s:.0f} s") from None
        if not line:
            raise Failed(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class Demo:
    def __init__(self, model_dir: pathlib.Path, home: pathlib.Path, stack: contextlib.ExitStack) -> None:
        import kvclient

        self.kvclient = kvclient
        say("starting four processes with the model")
        self.workers = {
            name: Worker(name, model_dir, home) for name in ("first", "second", "third", "doomed")
        }
        for worker in self.workers.values():
            stack.callback(worker.end)
        self.identities = {worker.answer(START_TIMEOUT_S)["identity"] for worker in self.workers.values()}
        self.client = stack.enter_context(kvclient.connect(dir=str(home)))
        self.tokenizer_dir = model_dir
        self.rows: list[tuple[str, str, dict]] = []
        self.failures: list[str] = []

    def expect(self, held: bool, what: str) -> None:
        if not held:
            self.failures.append(what)

    def note(self, name: str, did: str, result: dict) -> dict:
        self.rows.append((name, did, result))
        say(f"{name}: {did}: first token after {result['ttft_s']:.2f} s, {result['reused']} tokens reused")
        return result

    def chain(self, document: str):
        """The keys of the document's blocks, as every process of this model computes them."""
        import tokenizers

        ids = tokenizers.Tokenizer.from_file(str(self.tokenizer_dir / "tokenizer.json")).encode(document).ids
        return self.kvclient.chain(bytes.fromhex(next(iter(self.identities))), ids, block_tokens=BLOCK_TOKENS)

    def computed(self, document: str, layer: int) -> None:
        """Waits until whoever computes the document has put that layer of its first block into the store."""
        chain, end_s = self.chain(document)[:1], time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < end_s:
            with self.client.get(chain, follow=True) as blocks:
                if blocks[0] is not None:
                    blocks[0].wait_layer(layer, timeout_s=ANSWER_TIMEOUT_S)
                    return
            time.sleep(0.005)
        raise Failed(f"layer {layer} was not computed within {ANSWER_TIMEOUT_S:.0f} s")

    def plain(self, document: str, question: str) -> str:
        """The text that plain generate() gives, in the first process with the store left out."""
        self.workers["first"].ask(document, question, store=False)
        return self.workers["first"].answer()["text"]

    # ------------------------------------------------------------ the scenes

    def hits(self, document: str) -> None:
        first, second, third = (self.workers[name] for name in ("first", "second", "third"))
        whole = len(self.chain(document)) * BLOCK_TOKENS
        for worker, did, question, reused in (
            (first, "computes the document", ASK[0], 0),
            (second, "asks another question about it", ASK[1], whole),
            (third, "asks the same as first", ASK[0], whole),
        ):
            worker.ask(document, question)
            result = self.note(worker.name, did, worker.answer())
            self.expect(result["reused"] >= reused, f"{worker.name} reused {result['reused']}, not {reused}")
            result["equal"] = result["text"] == self.plain(document, question)
            self.expect(result["equal"], f"{worker.name}'s text differs from plain generate()")

    def follows(self, document: str) -> None:
        first, second = self.workers["first"], self.workers["second"]
        first.ask(document, ASK[0])
        self.computed(document, 0)
        second.ask(document, ASK[0])
        leads = self.note("first", "computes a second document", first.answer())
        joins = self.note("second", "joins while first computes it", second.answer())
        leads["equal"] = joins["equal"] = leads["text"] == joins["text"] == self.plain(document, ASK[0])
        self.expect(joins["followed"] > 0, "second computed by itself instead of following first")
        self.expect(leads["equal"], "the texts of first and second differ, or from plain generate()")

    def dies(self, document: str) -> None:
        doomed, third, chain = self.workers["doomed"], self.workers["third"], self.chain(document)
        doomed.ask(document, ASK[0])
        self.computed(document, 0)
        third.ask(document, ASK[0])
        self.computed(document, HALF_WAY)
        doomed.kill()
        say(f"doomed: killed behind layer {HALF_WAY} of 30")
        result = self.note("third", "had joined doomed, which was killed", third.answer())
        result["equal"] = result["text"] == self.plain(document, ASK[0])
        self.expect(result["equal"], "third's text after doomed's death differs from plain generate()")
        self.expect(result["lost"] > 0, "third had not joined doomed when it was killed")
        # The question's first words may fill the block that the document began.
        self.expect(result["published"] >= len(chain), "third did not publish what doomed left undone")

    def memory_is_back(self) -> dict:
        """Nothing that doomed had is left: only sealed blocks take memory."""
        stats = self.client.stats()
        left = {kind: stats[kind] for kind in ("created", "zombies", "quarantined") if stats[kind]}
        self.expect(not left, f"the killed process left {left}")
        return stats


ASK = ("\n\nIn short, the text above says that", "\n\nThe most important word of the text above is")


def documents() -> list[str]:
    """Real texts that every Python has: chapters of its own language reference."""
    return [topics[name][:DOCUMENT_CHARACTERS] for name in ("execmodel", "naming", "function")]


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def table(demo: Demo, before: dict, after: dict) -> str:
    lines = [
        "",
        "process  what it did                             first token   tokens reused   text as plain",
    ]
    cold = next(row[2]["ttft_s"] for row in demo.rows)
    for name, did, result in demo.rows:
        hit = result["reused"] and not result["followed"]
        times = f"{result['ttft_s']:6.2f} s" + (f" {result['ttft_s'] / cold:4.0%}" if hit else "")
        how = f"{result['reused']:5} of {result['prompt_tokens']}"
        lines.append(f"{name:8} {did:39} {times:13} {how:15} {'equal' if result['equal'] else 'DIFFERENT'}")
    first = demo.rows[1][2]
    lines += [
        "",
        f"second's answer: {first['text']!r}",
        f"memory in use:   {before['used_bytes'] >> 20} MiB before, {after['used_bytes'] >> 20} MiB after, "
        f"{after['blocks']} blocks; of the killed process nothing is left",
    ]
    return "\n".join(lines)


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    model_dir = example_model.ensure()
    home = pathlib.Path(tempfile.mkdtemp(prefix="kvstored-demo-"))
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(own_daemon.running(home, MEMORY))
            demo = Demo(model_dir, home, stack)
            before = demo.client.stats()
            hit, followed, unfinished = documents()
            demo.hits(hit)
            demo.follows(followed)
            demo.dies(unfinished)
            print(table(demo, before, demo.memory_is_back()))
        demo.expect(server.returncode == 0, f"the daemon ended with status {server.returncode}")
    except Failed as failed:
        print(f"demo: {failed}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for failure in demo.failures:
        print(f"demo: NOT AS EXPECTED: {failure}", file=sys.stderr)
    print("\nall as expected" if not demo.failures else "")
    return 1 if demo.failures else 0


if __name__ == "__main__":
    sys.exit(main())
