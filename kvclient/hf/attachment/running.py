"""One call of generate() through an attachment: with the store, or, for a reason that is counted, without.

Owns that decision, the count of calls that run, and what is said of a store that failed. Never looks anything
up: that is the Request's. Invariant: a call runs either wholly with what was found out about the model as it
is now, or wholly without the store; and detach() ends when none is left that began before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from kvclient.errors import DeadlineExceeded
from kvclient.hf.attachment.token_hook import TokenSeen, none_of_ours, with_criterion
from kvclient.hf.call import Report
from kvclient.hf.release import NAMES
from kvclient.hf.request.batch.row_by_row import RowByRow
from kvclient.hf.request.continuation import Continuation, Opened
from kvclient.hf.request.request import Request
from kvclient.hf.request.tolerance import STORE_ERRORS

if TYPE_CHECKING:
    from kvclient.hf.attachment.attach import Attachment

DETACH_S = 600.0  # that detach() waits for calls of other threads

log = logging.getLogger("kvclient.hf")


class Running:
    """The calls of one attachment that have begun and not ended, by thread."""

    def __init__(self) -> None:
        self._changed, self._threads = threading.Condition(), Counter[int]()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """While the body runs, a call of this thread is under way."""
        thread = threading.get_ident()
        with self._changed:
            self._threads[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._threads[thread] -= 1
                if not self._threads[thread]:
                    del self._threads[thread]
                self._changed.notify_all()

    def wait(self, timeout_s: float = DETACH_S) -> None:
        """Until no other thread runs a call. Raises DeadlineExceeded."""
        thread = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._threads.keys() - {thread}, timeout_s):
                still = len(self._threads.keys() - {thread})
                raise DeadlineExceeded(f"{still} threads still run generate() after {timeout_s} s")


def run(kv: Attachment, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """generate() with these arguments, by way of the store where it can have a part in it."""
    with kv._running.call():
        started, local = time.perf_counter(), kv._local
        whole = getattr(local, "bypass", None) == (True, True)
        if (reason := "bypass" if whole else none_of_ours(model, args, kwargs)) is not None:
            return _run_without(kv, Report(bypassed=reason), started, model, args, kwargs)
        try:
            cache = next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
            made = _request(kv, model, started, cache)
        except STORE_ERRORS as error:
            if kv._model_state.options.raises:
                raise
            failed = Report(bypassed="unavailable", bypass_detail=f"{type(error).__name__}: {error}")
            failed.store_error, failed.store_failed_s = failed.bypass_detail, time.perf_counter() - started
            return _run_without(kv, failed, started, model, args, kwargs)
        if isinstance(made, Report):
            return _run_without(kv, made, started, model, args, kwargs)
        args, kwargs = with_criterion(args, kwargs, TokenSeen(made))
        trial = getattr(local, "trial", None)
        outer, local.request = getattr(local, "request", None), made
        try:
            return kv._own(model, "generate")(*args, **kwargs)
        finally:
            local.request = outer
            try:
                made.finish()
            finally:
                _note(kv, made.report, trial)


def opened(kv: Attachment, model: torch.nn.Module, input_ids: torch.Tensor, config: Any) -> Opened | None:
    """A prompt [1, tokens] with its prefix in a cache, as this thread's calls are served now, for a pass that
    is its caller's, who calls closed() after it. None: generate() is to be asked, which says why.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(kv._running.call())
        try:
            made = _request(kv, model, time.perf_counter(), None, Opened)
            if not isinstance(made, Opened):
                return None
            made.ends_with(stack.pop_all().close)
            usable = made.begin(model, input_ids, config)
        except STORE_ERRORS:  # generate() says what it goes on without
            usable = False
    if not usable:
        made.finish()
        return None
    return made


def closed(kv: Attachment, made: Opened) -> None:
    """Its pass has ended, well or not: what was claimed and not computed() is given back."""
    try:
        made.finish()
    finally:
        _note(kv, made.report)


def _request(
    kv: Attachment, model: torch.nn.Module, started: float, cache: Any, kind: type[Request] = Request
) -> Request | Report:
    """What serves a call that begins now, with a cache or without; or, as a report, why the store has no part
    in it."""
    local, state = kv._local, kv._model_state
    if not kv._rest.over:
        return Report(bypassed="unavailable", bypass_detail="the store failed a moment ago")
    if not state.current(model):
        return Report(bypassed="refused", bypass_detail=state.refusal)
    watch = state.watch  # before the served model: of a later one it would know the change
    served = kv._chosen()
    if (random := watch.random()) is not None:
        return Report(bypassed="training", bypass_detail=random)
    no_read, no_write = getattr(local, "bypass", (False, False))
    trial = getattr(local, "trial", None)
    inside, publish_tokens = getattr(local, "limits", (True, None))
    limits = {"publish_tokens": publish_tokens, "search": inside, **getattr(local, "keeping", {})}
    limits["static"] = getattr(local, "static", False)
    called = (kv.client, served, dataclasses.replace(state.options, **limits))
    client, served, options = called if trial is None else trial.on(served)
    made = Continuation if cache is not None and cache.get_seq_length() else kind
    if made is Request and served.non_prefix is not None:
        made = RowByRow
    request = made(
        client, served, options, kv._memory, kv._pace, kv._returned, not no_read, not no_write, kv.padded,
        started, lambda: not (watch.random() or watch.changed()),
    )  # fmt: skip
    if trial is None and options.in_place is None:
        request.report.dense = state.adopted.left
    return request


def _run_without(
    kv: Attachment, report: Report, started: float, model: torch.nn.Module, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    outer, kv._local.request = getattr(kv._local, "request", None), None
    try:
        return kv._own(model, "generate")(*args, **kwargs)
    finally:
        kv._local.request = outer
        report.total_s = time.perf_counter() - started
        _note(kv, report)


def _note(kv: Attachment, report: Report, trial: Any = None) -> None:
    if trial is not None:
        trial.report = report
        return
    kv.last = kv._local.last = report
    kv._totals.add(report)
    if report.store_error is None:
        return
    kv._rest.begin(report.store_failed_s)
    log.warning("generate() went on without the store: %s", report.store_error)
    if not kv._warned:
        kv._warned = True
        warnings.warn(
            f"generate() goes on without the store: {report.store_error} (said once; `last.store_error` and "
            'stats have each; attach(on_error="raise") raises instead)',
            stacklevel=4,
        )
