"""kvclient-serve over a loop that answers at once: what HTTP, schemas, tokenizer and streaming cost alone.

    python -m bench.serving.instant MODEL PORT

Owns a stand-in for the loop: one token after another from a thread, without a model.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import transformers

from kvclient.serve import listening
from kvclient.serve.engine.job import Done, Job, Prompt, Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.http.app import create_app
from kvclient.serve.http.asking import Asking
from kvclient.serve.scheduler import Limits


class InstantLoop:
    """Says `token` as often as is asked for."""

    identity, limits = bytes(32), Limits()

    def __init__(self, token: int) -> None:
        self._token, self._jobs = token, queue.SimpleQueue[Job]()
        self.ready = threading.Event()
        self.ready.set()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def cancel(self, job: Job) -> None:
        job.cancelled = True

    def stats(self) -> dict[str, Any]:
        return {"requests_running": 0, "requests_waiting": 0}

    def store_stats(self) -> dict[str, Any]:
        return {}

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            job.tell(Prompt(0, 0, 0, 0, None))
            for _ in range(job.new_tokens):
                job.tell(Token(job.text.add(self._token), Chosen(self._token)))
            job.tell(Done("length", job.text.end()))


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    token = tokenizer(" word")["input_ids"][-1]
    asking = Asking(tokenizer, "instant", InstantLoop(token), 8192, len(tokenizer))  # type: ignore[arg-type]
    door = listening.bound("bench.serving.instant", "127.0.0.1", port)
    assert door is not None, "the port is taken"
    listening.serve(create_app(asking, "instant"), door)


if __name__ == "__main__":
    main()
