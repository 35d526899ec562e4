"""A store that fails under a call: the rest of the call goes on without it.

Owns which errors are the store's, what a report says of them, and when the store is asked again. Never hides
an error of the model's own code: only steps that touch nothing but the store are tried here, and a load
within the model's pass is a LoadFailed; nor one of a broken invariant, which is none of FAILURES. Invariant:
what was claimed or pinned before the failure is given back as far as the store still listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from kvclient.hf.call import FAILURES, LoadFailed, Report

REST = 10  # times as long as a failure lasted, the store is left alone: it costs a tenth of the time at most
MOST_REST_S = 30.0


class Tolerance:
    """Of one call. raises: errors are the caller's, who asked for them."""

    def __init__(self, report: Report, raises: bool) -> None:
        self._report, self._raises = report, raises

    @property
    def failed(self) -> bool:
        """Whether a call of the store failed."""
        return self._report.store_error is not None

    def tried(self, step: Callable[..., Any], *args: Any) -> bool:
        """Whether the step ended well. Raises what it raised where that was asked for."""
        began = monotonic()
        try:
            step(*args)
        except FAILURES as error:
            if self._raises:
                raise
            self.note(error, monotonic() - began)
            return False
        return True

    def note(self, error: BaseException, seconds: float = 0.0) -> None:
        """What the call goes on without the store for, and how many seconds it took; the first error is the
        one that is told.
        """
        if isinstance(error, LoadFailed):
            error = error.__cause__ or error
        self._report.store_error = self._report.store_error or f"{type(error).__name__}: {error}"
        self._report.store_failed_s += seconds


class Rest:
    """When a store that failed is asked again. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._until_s = threading.Lock(), 0.0

    @property
    def over(self) -> bool:
        """Whether the store may be asked again."""
        return monotonic() >= self._until_s

    def begin(self, lost_s: float) -> None:
        """A failure took so many seconds of a call."""
        with self._lock:
            self._until_s = max(self._until_s, monotonic() + min(REST * lost_s, MOST_REST_S))
