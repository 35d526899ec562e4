"""Answers that have ended: kept in the store, and then said to have ended; and of those that go on each block
that is full.

Owns that order, and what keeping an answer means. Never computes, and delays no token of a step: its owner
calls settle() behind it, when all are told. Invariant: whoever heard a Done finds the answer's
whole blocks and its tail in the store, at any server of it, if there is a store that takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvclient.hf.attachment.attach import Attachment
from kvclient.hf.attachment.publish import keeps_of
from kvclient.serve.engine.job import Done, Job
from kvclient.serve.engine.joining import Asked
from kvclient.serve.scheduler import Entry


class Endings:
    """Of one loop. asked: the store as a job wants it, within the block. tell: an event to its job."""

    def __init__(
        self, kv: Attachment, asked: Asked, tell: Callable[[Job, Done], None], counts: Counter[str]
    ) -> None:
        self._kv, self._asked, self._tell, self._counts = kv, asked, tell, counts
        self._ended: list[tuple[Job, Done]] = []

    def add(self, job: Job, event: Done) -> None:
        """It has said its last token. Its cache is needed until settle()."""
        self._ended.append((job, event))

    def settle(self, running: Sequence[Entry] = ()) -> None:
        """Keeps what has ended and tells so, one after the other; then what the others have filled."""
        for job, event in self._ended:
            self.publish(job)
            job.cache = None
            self._tell(job, event)
        self._ended.clear()
        size = self._kv.chunker.most
        for job in (entry.job for entry in running if entry.job.entry is entry):
            job.kept = len(job.prompt) // size if job.kept is None else job.kept
            if (full := (len(job.prompt) + len(job.tokens) - 1) // size) > job.kept:
                kept, job.kept = job.kept, full
                self.publish(job, kept * size)

    def publish(self, job: Job, behind: int | None = None) -> None:
        """Its answer's blocks, so that the next turn of its conversation finds them: also of one whose client
        left, for what it saw comes back. behind: of one that goes on the whole ones behind so many tokens,
        where blocks are all that is kept of a text; what was evicted of those before is not written again.
        """
        goes_on = behind is not None
        if job.cache is None or not (job.write and job.exact and len(job.tokens) > 1):
            return
        if goes_on and job.windowing is not None:
            return
        text = job.said[:-1]  # the newest has no KV yet
        try:
            if job.windowing is not None:
                with self._kv.salted(job.salt):
                    self._counts["windows_saved_total"] += job.cache.save(text)
                return
            if not keeps_of(job.cache):  # its prompt's call went without the store
                return
            with self._asked(job), self._kv.keeping(tails=not goes_on):
                if goes_on and not self._kv._chosen().plain:
                    return
                self._counts["blocks_of_answers_total"] += self._kv.publish(text, job.cache, behind or 0)
        except Exception:  # without a store there is nothing to keep; the answer is whole
            self._counts["publish_failed_total"] += 1
