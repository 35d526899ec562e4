"""Prompts that are computed without a generate() of their own: of which little is missing, in the step of
those that run, and longer ones in pieces, each into the prompt's one cache.

Owns the question whether a prompt is such a one, and its Opened from the first pass to the last. Never
computes. Invariants: a prompt that needs more than its own cache beside the step (a window, scores of its
tokens, what another process is computing now) is none of them; and while one is open, this thread waits for
nobody's blocks: they may be those that it is to compute itself, or wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from kvclient.hf.attachment import running
from kvclient.hf.attachment.attach import Attachment
from kvclient.hf.call import FAILURES
from kvclient.hf.connector.part import MIN_TAIL, tokens_behind
from kvclient.hf.request.continuation import Opened
from kvclient.hf.request.served_model import ServedModel
from kvclient.serve.engine.job import Behind, Job
from kvclient.serve.scheduler import Entry, Look

log = logging.getLogger(__name__)
Asked = Callable[[Job], contextlib.AbstractContextManager[None]]


class Joining:
    """Of one loop."""

    def __init__(self, model: torch.nn.Module, kv: Attachment) -> None:
        self._model, self._kv = model, kv
        self._open: set[Job] = set()

    @contextlib.contextmanager
    def asked(self, job: Job) -> Iterator[None]:
        """The store as the request wants it: whose KV, in which codec, inside prompts too, kept how long."""
        kv = self._kv
        keeping = kv.keeping(job.priority, job.ttl_s, tails=True)
        limited, room = kv.limited(job.inside, follow=not self.busy), kv.roomy(job.room)
        with kv.salted(job.salt), self._coded(job.codec), limited, keeping, room:
            yield

    def stored(self, prompt: Sequence[int], salt: bytes, codec: str | None = None) -> int:
        """How many of its first tokens are in the store's memory; 0 if that fails. From any thread."""
        with contextlib.suppress(*FAILURES), self._kv.salted(salt), self._coded(codec):
            chain = self._kv.chunker.chain(self._kv.identity, list(prompt))
            return sum(chain.token_counts[: self._kv.client.lookup(chain).resident]) if len(chain) else 0
        return 0

    def _coded(self, codec: str | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if codec is None else self._kv.coded(codec)

    @property
    def busy(self) -> bool:
        """Whether a prompt is between two pieces: its blocks are claimed, and nobody computes them."""
        return bool(self._open)

    def look(self, entry: Entry) -> Look | None:
        """What its prompt comes to."""
        job, kv = entry.job, self._kv
        if job.opened is not None:
            return Look(job.opened.held)
        alone = job.windowing is not None or job.prompt_logprobs is not None or job.apart
        if alone or kv._model_state.options.in_place is None or self._model.device.type != "cpu":
            return None  # only attention in place takes requests of any lengths side by side
        try:
            with self.asked(job):
                served, said = kv._chosen(), job.said
                chain = kv.chunker.chain(served.identity, said)
                plain, whole = served.plain and served.parts is None, len(chain)
                if plain and not whole:  # a prompt that is shorter than a block is found as a whole
                    left = served.tail_tokens(len(said), kv.chunker.block_tokens)
                    chain = kv.chunker.chain(served.identity, said[:left], partial=True)
        except FAILURES:
            return None  # generate() says what is wrong with it
        try:
            found = kv.client.lookup(chain) if len(chain) else None
            if found is not None and found.pending:  # generate() follows who computes it
                return Look(0, held=True) if self.busy else None
            stored = found.resident if found is not None and job.read else 0
            if not (job.read and job.write):
                return Look(sum(chain.token_counts[:stored]))
            if plain and whole and stored:
                return self._behind(job, served, chain, stored)
        except FAILURES:
            return None  # generate() knows what to do without a store
        missing = chain.keys[stored] if stored < len(chain) else None
        return Look(sum(chain.token_counts[:stored]), missing)

    def _behind(self, job: Job, served: ServedModel, chain: Any, stored: int) -> Look:
        """The same of a prompt of which so many whole blocks are stored: texts that part inside of the next
        one share what is before that.
        """
        size, have = self._kv.chunker.block_tokens, sum(chain.token_counts[:stored])
        key, rest = chain.keys[stored - 1], np.array(job.said[have:], np.int32)
        if not served.tail_tokens(len(rest), size):
            return Look(have)  # what too few are is kept nowhere
        # Each get() counts as a use of what is got, and one prompt is looked at before many steps.
        keys = [key, *self._kv.client.children(key)]
        if job.behind is None or job.behind.keys != keys:
            job.behind = Behind(keys, tokens_behind(self._kv.client, served.identity, key, keys[1:], rest))
        part = job.behind.tokens
        shared = rest[: part + math.ceil(MIN_TAIL * size)]  # worth a step of its own
        return Look(have + part, key + shared.tobytes() if part < len(rest) - 1 else None)

    @contextlib.contextmanager
    def opened(self, entry: Entry) -> Iterator[Opened | None]:
        """For the pass within the block, which is the last. None: generate() is asked, now and later."""
        made = self.begin(entry)
        if made is not None:
            made.upto = entry.prompt_tokens
        try:
            yield made
        finally:
            self.end(entry.job)

    def begin(self, entry: Entry) -> Opened | None:
        """What its next pass goes into: the same until end(). None: as opened() has it."""
        job = entry.job
        if job.opened is None:
            job.opened = self._made(entry)
            if job.opened is not None:
                self._open.add(job)
            elif (look := self.look(entry)) is not None and not look.held:
                job.apart = True  # nor is it that somebody else has claimed it a moment ago
        return job.opened

    def failed(self, job: Job) -> None:
        """Of a pass of it, which is being handled: generate() is asked for the rest."""
        log.warning("a piece of a prompt failed, generate() computes the rest", exc_info=True)
        job.apart = True
        self.end(job)

    def end(self, job: Job) -> None:
        """Gives back what its prompt has claimed and not computed. Idempotent."""
        made, job.opened = job.opened, None
        self._open.discard(job)
        try:
            if made is not None:
                running.closed(self._kv, made)
        except Exception:  # of giving back: the pass is whole, and the requests beside it are others'
            log.exception("what a prompt had claimed was not given back")

    def _made(self, entry: Entry) -> Opened | None:
        job, kv = entry.job, self._kv
        ids = torch.tensor([job.said])
        config = GenerationConfig(max_length=ids.shape[1] + entry.new_tokens, eos_token_id=None)
        made: Opened | None = None
        with (
            contextlib.suppress(Exception),  # generate() meets it too, and its request hears of it
            self.asked(job), kv.bypass(read=not job.read, write=not job.write),
        ):  # fmt: skip
            made = running.opened(kv, self._model, ids, config)
        return made
