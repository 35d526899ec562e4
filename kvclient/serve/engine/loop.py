"""The one thread that owns the model: it asks the scheduler what to compute, computes it, tells who waits.

Owns the model, its attachment and the caches of the requests under way. HTTP threads hand in jobs and hear of
them by events; nothing else crosses. Never waits while there is something to compute. Invariants: every job
that was taken in hears exactly one Done or Failed, or the process ends; a cancelled one costs at most the
step that was under way.

A prompt is computed in pieces, between which others come in and decoding goes on: into its request's cache,
a short rest with the step of those that run; where only generate() can, each finds those before in the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvclient.hf.attachment.attach import Attachment
from kvclient.hf.call import Report
from kvclient.hf.release import cache_of
from kvclient.hf.request.continuation import Opened
from kvclient.hf.speculation import NOTHING, Draft, keep
from kvclient.hf.speculation.cache import unfit
from kvclient.serve.engine import thread
from kvclient.serve.engine.drafting import Drafting, accept
from kvclient.serve.engine.endings import Endings
from kvclient.serve.engine.idle import Idle
from kvclient.serve.engine.job import Done, Event, Failed, Job, Prompt, Token
from kvclient.serve.engine.joining import Joining
from kvclient.serve.engine.passes import Passes, cut_back
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.engine.windowed import WindowedCache
from kvclient.serve.scheduler import Decode, Entry, Limits, Preempt, Prefill, QueueFull, Scheduler


class Loop:
    """Thread-safe: submit(), cancel(), stats and close(); else its own thread's. Raises what Passes does."""

    def __init__(
        self, model: torch.nn.Module, kv: Attachment, limits: Limits, drafting: Drafting | None = None
    ) -> None:
        if drafting is not None:
            limits = dataclasses.replace(limits, step_tokens=1 + drafting.tokens)
        self._model, self._kv, self.limits, self._drafting = model, kv, limits, drafting
        self._passes, self._joining = Passes(model, kv), Joining(model, kv)
        self._scheduler = Scheduler(limits, time.monotonic, self._joining.look)
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._queued = threading.Lock(), 0  # of the scheduler's queue length, for submit()
        self.counts, self.ready = Counter[str](), threading.Event()  # ready: a token was computed
        plain, coded = dataclasses.replace(kv.form, codec=None).bytes_per_token, kv.form.bytes_per_token
        sizes = {"kv_bytes_per_token": coded, "kv_bytes_per_token_uncoded": plain}
        self._endings = Endings(kv, self._joining.asked, self._tell, self.counts)
        self._fixed = {"device": str(model.device), **sizes}
        self._closed, self._idle = False, Idle(kv, self.counts)
        self._thread = thread.start(self._run, "kvclient-serve-loop")

    # ---------------------------------------------------------------- other threads

    def submit(self, job: Job) -> None:
        """Raises QueueFull."""
        with self._lock:
            if self._closed:
                raise QueueFull("the server is ending")
            if self._queued >= self.limits.max_queue:
                raise QueueFull(f"{self._queued} requests wait already, {self.limits.max_queue} may")
            self._queued += 1
        self._news.put(lambda: self._take(job))

    def cancel(self, job: Job) -> None:
        """Its client is gone. Idempotent; nothing is told of it afterwards."""
        job.cancelled = True
        self._news.put(lambda: self._drop(job))

    def stats(self) -> dict[str, Any]:
        """Figures of requests and of the store, by name."""
        return {
            "requests_waiting": self._queued, "requests_running": self._scheduler.active, **self.counts,
            "held_tokens": self._scheduler.held_tokens, "kv": self._kv.stats, **self._fixed,
        }  # fmt: skip

    @property
    def identity(self) -> bytes:
        """The model's reuse identity, 32 bytes."""
        return self._kv.identity

    def store_stats(self) -> dict[str, Any]:
        """Raises what the store does."""
        return self._kv.client.stats()

    def stored(self, prompt: Sequence[int], salt: bytes, codec: str | None = None) -> int:
        """How many of its first tokens are in the store's memory; 0 if that fails. From any thread."""
        return self._joining.stored(prompt, salt, codec)

    def close(self) -> None:
        """Ends after the step under way; what is unfinished hears Failed."""
        with self._lock:
            self._closed = True
        self._news.put(None)
        self._thread.join()

    # ---------------------------------------------------------------- the loop

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while self._hear(block=self._scheduler.idle):
            for entry in self._scheduler.expired():
                self._finish(entry.job, Failed(504, f"not done within {self.limits.timeout_s:g} s"))
            work = self._scheduler.next()
            if isinstance(work, Preempt):
                self._preempt(work.entry.job)
            elif isinstance(work, Prefill):
                compute = self._piece if work.kept else self._prefill
                self._guarded([work.entry], functools.partial(compute, work.entry, work.upto))
            elif isinstance(work, Decode) and work.pieces:
                self._together(work)
            elif isinstance(work, Decode):
                self._guarded(work.entries, functools.partial(self._decode, work.entries))
            self._endings.settle(work.entries if isinstance(work, Decode) else ())
        for entry in self._scheduler.entries:
            self._finish(entry.job, Failed(503, "the server is ending"))

    def _hear(self, block: bool) -> bool:
        """Takes in what other threads said. False: the end."""
        while True:
            try:
                news = self._news.get(block=block, timeout=1.0 if block else None)
            except queue.Empty:
                self._idle() if block else None
                return True
            if news is None:
                return False
            news()
            block = False

    def _take(self, job: Job) -> None:
        if job.cancelled:
            return self._left_queue(job)
        most = None if job.windowing is None else job.windowing.most_tokens
        job.entry = self._scheduler.submit(job, len(job.prompt), job.new_tokens, most)
        self.counts["requests_total"] += 1
        return None

    def _left_queue(self, job: Job) -> None:
        if job.pieces == 0:
            job.pieces = -1
            with self._lock:
                self._queued -= 1

    def _drop(self, job: Job) -> None:
        if job.entry is not None:
            self._left_queue(job)
            self._scheduler.remove(job.entry)
            self._joining.end(job)
            self._endings.publish(job)
            job.cache = job.entry = None
            self.counts["requests_cancelled_total"] += 1

    def _guarded(self, entries: list[Entry], compute: Callable[[], None]) -> None:
        """One request's failure is its own; of a step for several, each is computed alone then."""
        try:
            compute()
        except Exception as error:  # whatever a model raises ends its requests, never the server
            if len(entries) > 1:
                for entry in entries:
                    cut_back(entry.job)
                    self._guarded([entry], functools.partial(self._decode, [entry]))
                return
            self.counts["requests_failed_total"] += 1
            self._finish(entries[0].job, Failed.of(error))

    def _tell(self, job: Job, event: Event) -> None:
        if not job.cancelled:
            job.tell(event)

    def _finish(self, job: Job, event: Done | Failed) -> None:
        if job.entry is not None:
            self._left_queue(job)
            self._scheduler.remove(job.entry)
        self._joining.end(job)
        if job.windowing is not None and job.cache is not None and isinstance(event, Done):
            event = dataclasses.replace(event, window=job.cache.told())
        if job.draft is not None and isinstance(event, Done):
            event = dataclasses.replace(event, accepted=job.draft.accepted, rejected=job.draft.rejected)
        if isinstance(event, Done):
            self._endings.add(job, event)
        else:
            self._tell(job, event)
            job.cache = None
        job.entry = None

    def _preempt(self, job: Job) -> None:
        """Its KV goes to the store, its pages back; it comes again with all it said as its prompt."""
        self._endings.publish(job)
        self._joining.end(job)
        job.cache = None
        if job.draft is not None and self._drafting is not None:
            job.draft.session = self._drafting.begin().session  # a draft model's KV goes back too
        self.counts["requests_preempted_total"] += 1

    # ---------------------------------------------------------------- computing

    def _prefill(self, entry: Entry, upto: int) -> None:
        job, last, text = entry.job, upto == entry.prompt_tokens, entry.job.said
        began = time.perf_counter()
        self._left_queue(job)
        job.pieces = max(job.pieces, 0) + 1
        if job.windowing is not None:
            return self._fill_window(entry, upto)
        if entry.filled == 0 and not last:
            stored = self.stored(text, job.salt, job.codec) if job.read else 0
            kept = job.read and job.write and not self._kv.client.degraded  # for the next piece
            least = stored + self.limits.piece_tokens if kept else entry.prompt_tokens
            upto = min(entry.prompt_tokens, max(upto, least))
            last = upto == entry.prompt_tokens
        ids = torch.tensor([text[:upto]], device=self._model.device)
        with self._joining.asked(job), self._kv.bypass(read=not job.read, write=not job.write):
            out = self._passes.generated(ids)
        report = self._kv.last_here
        reused = report.reused_tokens if report is not None else 0
        self.counts["prompt_tokens_computed_total"] += upto - reused
        job.exact = job.exact and (report is None or report.exact)
        self._passes.note_rate(upto - reused, time.perf_counter() - began)
        if not self._noted(entry, report) and reused + self._kv.chunker.most < entry.filled:
            entry.whole = True  # the store kept not even whole blocks of the pieces before: no more of them
        self._scheduler.filled(entry, upto)
        if last:
            job.cache = cache_of(out)
            said = self._passes.prompt_logprobs(job, ids) if job.prompt_logprobs is not None else ()
            self._begins(job, out.logits[0][0], said)
        return None

    def _piece(self, entry: Entry, _upto: int) -> None:
        """The next of a prompt's tokens, into the cache that its answer goes on from. Where that cannot be,
        or fails, generate() is asked next: it says why, and goes on without a store that fails."""
        job = entry.job
        self._left_queue(job)
        if (made := self._joining.begin(entry)) is None:
            return None
        made.upto = made.held + self.limits.piece(entry.prompt_tokens - made.held)
        try:
            logits = self._decode([], [made])[0]
        except Exception:
            return self._joining.failed(job)
        if made.held < entry.prompt_tokens:
            job.pieces = max(job.pieces, 0) + 1
            return self._scheduler.filled(entry, made.held)
        job.cache, report = made.cache, made.report
        self._joining.end(job)
        return self._joined(entry, report, logits)

    def _noted(self, entry: Entry, report: Report | None) -> bool:
        """What was found of a prompt is told once. False: it was already."""
        job = entry.job
        inside = report.approximate_tokens if report is not None else 0
        if (first := job.first) is not None:  # what a later piece found inside is told with it
            job.first = dataclasses.replace(first, approximate_tokens=max(inside, first.approximate_tokens))
            return False
        reused, tiers = (report.reused_tokens, report.reused_by_tier) if report is not None else (0, {})
        self.counts.update(prompt_tokens_total=entry.prompt_tokens, cached_tokens_total=reused)
        cold_s = self._passes.cold_s(entry.prompt_tokens)
        job.first = Prompt(reused, tiers.get("disk", 0), tiers.get("peer", 0), inside, cold_s)
        return True

    def _begins(self, job: Job, logits: torch.Tensor, said: tuple[Chosen | None, ...] = ()) -> None:
        """Its prompt is computed; logits: [vocabulary] behind it. said: of the prompt's tokens."""
        if not job.tokens:  # not one that comes again
            self._tell(job, dataclasses.replace(job.first, logprobs=said))
        self.ready.set()
        self._chosen(job, logits)

    def _fill_window(self, entry: Entry, upto: int) -> None:
        """A piece of a prompt into a window; first, what the turn before left."""
        job = entry.job
        if job.first is None:
            job.cache = WindowedCache(self._model, self._kv, job.windowing)
            with self._kv.salted(job.salt):
                found = job.cache.resume(job.prompt) if job.read else 0
            self.counts["prompt_tokens_total"] += entry.prompt_tokens
            self.counts["cached_tokens_total"] += found
            job.first = Prompt(found, 0, 0, 0, self._passes.cold_s(entry.prompt_tokens))
            upto = min(entry.prompt_tokens, max(upto, found + self.limits.piece_tokens))
            entry.filled = found
        began = time.perf_counter()
        logits = job.cache.feed(job.prompt[entry.filled : upto])
        self.counts["prompt_tokens_computed_total"] += upto - entry.filled
        self._passes.note_rate(upto - entry.filled, time.perf_counter() - began)
        self._scheduler.filled(entry, upto)
        if upto == entry.prompt_tokens:
            self._begins(job, logits)

    def _together(self, work: Decode) -> None:
        """Short rests of prompts with the next tokens of those that run; where that fails, each by itself."""
        with contextlib.ExitStack() as stack, self._kv.looked_at(self._model):
            opened = {p.entry: stack.enter_context(self._joining.opened(p.entry)) for p in work.pieces}
            joined = {entry: made for entry, made in opened.items() if made is not None}
            apart = opened.keys() - joined.keys()
            caches = [made.cache for made in joined.values()]  # which those let go of at their end
            try:
                logits = self._decode(work.entries, list(joined.values()))
            except Exception:  # of which request it is, is found by computing them apart
                cut_back(*(entry.job for entry in work.entries))
                logits, apart = [], opened.keys()
                self._guarded(work.entries, functools.partial(self._decode, work.entries))
        for (entry, made), cache, rows in zip(joined.items(), caches, logits, strict=False):
            entry.job.cache = cache
            self._guarded([entry], functools.partial(self._joined, entry, made.report, rows[0]))
        for entry in apart:
            self._guarded([entry], functools.partial(self._prefill, entry, entry.prompt_tokens))

    def _joined(self, entry: Entry, report: Report, logits: torch.Tensor) -> None:
        self._left_queue(entry.job)
        entry.job.pieces = max(entry.job.pieces, 0) + 1
        self._noted(entry, report)
        self._scheduler.filled(entry, entry.prompt_tokens)
        self._begins(entry.job, logits)

    def _decode(self, entries: list[Entry], joined: Sequence[Opened] = ()) -> list[torch.Tensor]:
        """The logits behind the prompts that joined. What the pass raises, it raises before it tells."""
        for entry in [entry for entry in entries if entry.job.windowing is not None and entry.job.entry]:
            self._guarded([entry], functools.partial(self._decode_window, entry.job))
        jobs = [entry.job for entry in entries if entry.job.windowing is None]
        if not jobs and not joined:
            return []
        if len(jobs) > 1 and not self._passes.ragged:  # by itself: one that fails undoes no other's states
            for job in jobs:
                self._guarded([job.entry], functools.partial(self._decode, [job.entry]))
            return []
        drafts = [self._draft(job) for job in jobs]
        began, computed = time.perf_counter(), sum(len(made.rest) for made in joined)
        logits = self._passes.step(jobs, [draft for draft, _ in drafts], joined)
        self.counts.update(steps_total=1, prompt_tokens_computed_total=computed)
        if self._drafting is not None and not joined:
            rows = sum(1 + len(draft.tokens) for draft, _ in drafts)
            self._drafting.cost.note(rows, time.perf_counter() - began)
        for job, (draft, draft_s), rows in zip(jobs, drafts, logits, strict=False):
            accepting = functools.partial(self._accepted, job, draft, rows, draft_s, len(jobs))
            self._guarded([job.entry], accepting)
        return logits[len(jobs) :]

    def _draft(self, job: Job) -> tuple[Draft, float]:
        if self._drafting is None or unfit(self._model, job.cache) is not None:
            return NOTHING, 0.0
        if job.draft is None:
            job.draft = self._drafting.begin()
        left = job.new_tokens - len(job.tokens)
        return self._drafting.draft(job.draft, job.said, left, job.sampler)

    def _accepted(self, job: Job, draft: Draft, logits: torch.Tensor, draft_s: float, batch: int) -> None:
        path, said = accept(draft, job.sampler, logits)
        keep(job.cache, draft, path.nodes) if draft.tokens else None
        if draft.tokens and self._drafting is not None and job.draft is not None:
            guessed, right = len(draft.tokens), len(path.nodes)
            job.draft.note(guessed, right, draft_s, self._drafting.cost, batch)
            self.counts["draft_tokens_accepted_total"] += right
            self.counts["draft_tokens_rejected_total"] += guessed - right
        for answer in said:
            if job.entry is None:  # what was guessed behind its end is nothing
                break
            self._say(job, answer)

    def _decode_window(self, job: Job) -> None:
        """By itself: its older tokens are brought back for one pass only."""
        self._chosen(job, job.cache.feed(job.tokens[-1:]))

    def _chosen(self, job: Job, logits: torch.Tensor) -> None:
        if job.new_tokens == 0:  # scoring only
            return self._finish(job, Done("length", ""))
        return self._say(job, job.sampler.pick(logits.cpu()))

    def _say(self, job: Job, picked: Chosen) -> None:
        self.counts["tokens_generated_total"] += 1
        job.tokens.append(picked.token)
        if picked.token in job.ends:
            return self._ended(job, "stop")
        shown = job.text.add(picked.token)
        self._tell(job, Token(shown, picked))
        if job.text.stopped is not None:
            return self._finish(job, Done("stop", "", job.text.stopped))
        if job.sampler.matcher is not None and job.sampler.matcher.over:
            return self._ended(job, "stop")
        if len(job.tokens) >= job.new_tokens:
            return self._ended(job, "length")
        if (entry := job.entry) is not None:
            self._scheduler.generated(entry, len(job.said) - entry.prompt_tokens)
        return None

    def _ended(self, job: Job, reason: str) -> None:
        """A stop string may be in what was held back, beside a character that never came whole."""
        text = job.text.end()
        stopped = job.text.stopped
        self._finish(job, Done(reason if stopped is None else "stop", text, stopped))
