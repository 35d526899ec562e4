"""Answers that have ended: kept in the store, and then said to have ended.

Owns that order, and what keeping an answer means. Never computes, and delays no token: its owner calls
settle() behind a step, whose tokens are all told by then. Invariant: whoever heard a Done finds the answer's
whole blocks and its tail in the store, at any server of it, if there is a store that takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvclient.hf.attachment.attach import Attachment
from kvclient.hf.attachment.publish import keeps_of
from kvclient.serve.engine.job import Done, Job
from kvclient.serve.engine.joining import Asked


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

    def settle(self) -> None:
        """Keeps what has ended and tells so, one after the other."""
        for job, event in self._ended:
            self.publish(job)
            job.cache = None
            self._tell(job, event)
        self._ended.clear()

    def publish(self, job: Job) -> None:
        """Its answer's blocks, so that the next turn of its conversation finds them: also of one whose client
        left, for what it saw comes back.
        """
        if job.cache is None or not (job.write and job.exact and len(job.tokens) > 1):
            return
        text = job.said[:-1]  # the newest has no KV yet
        try:
            if job.windowing is not None:
                with self._kv.salted(job.salt):
                    self._counts["windows_saved_total"] += job.cache.save(text)
                return
            if not keeps_of(job.cache):  # its prompt's call went without the store
                return
            with self._asked(job):
                self._counts["blocks_of_answers_total"] += self._kv.publish(text, job.cache)
        except Exception:  # without a store there is nothing to keep; the answer is whole
            self._counts["publish_failed_total"] += 1
