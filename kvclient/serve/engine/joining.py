"""Prompts of which little is missing: computed in the step of those that run, without a generate() of their
own.

Owns the question whether a prompt is such a one, and its Opened for one pass. Never computes. Invariant: a
prompt that needs more than its own cache beside the step (a window, scores of its tokens, what another
process is computing now) is none of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
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
    """Of one loop. asked: the store as a job wants it, within the block."""

    def __init__(self, model: torch.nn.Module, kv: Attachment, asked: Asked) -> None:
        self._model, self._kv, self._asked = model, kv, asked

    def look(self, entry: Entry) -> Look | None:
        """What its prompt comes to."""
        job, kv = entry.job, self._kv
        alone = job.windowing is not None or job.prompt_logprobs is not None or job.apart
        if alone or kv._model_state.options.in_place is None or self._model.device.type != "cpu":
            return None  # only attention in place takes requests of any lengths side by side
        try:
            with self._asked(job):
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
            if found is not None and found.pending:
                return None  # generate() follows who computes it
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
        """For one pass, within the block. None: generate() is to be asked, now and later."""
        job, kv = entry.job, self._kv
        ids = torch.tensor([job.said])
        config = GenerationConfig(max_length=ids.shape[1] + entry.new_tokens, eos_token_id=None)
        made: Opened | None = None
        with (
            contextlib.suppress(Exception),  # generate() meets it too, and its request hears of it
            self._asked(job), kv.bypass(read=not job.read, write=not job.write),
        ):  # fmt: skip
            made = running.opened(kv, self._model, ids, config)
        if made is None:
            job.apart = True
        try:
            yield made
        finally:
            if made is not None:
                try:
                    running.closed(kv, made)
                except Exception:  # of giving back: the pass is whole, and the requests beside it are others'
                    log.exception("what a prompt had claimed was not given back")
