"""The thread that prompts which are handed over are computed in, and that holds their blocks afterwards.

Owns the thread. Never knows what is computed or held. Invariant: what holds is called once, behind a prefill
that ended well, and never after one that raised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from kvclient.errors import KVClientError
from kvclient.hf.handoff.first_token import First


class Prefill:
    """A thread that computes prompts, publishes their blocks, and holds them."""

    def __init__(
        self, compute: Callable[[Callable[[bytes], None]], First | None],
        hold: Callable[[threading.Event, bytes], None],
    ) -> None:  # fmt: skip
        self._compute, self._hold = compute, hold
        self.first: First | None = None  # the first token, once it was chosen
        self.inside = b""  # keys of blocks of other prompts that are used in these, as far as it has begun
        # Set once a prompt is about to be computed, and its blocks are claimed; or no more is to come.
        self.begun = threading.Event()
        self._error: BaseException | None = None
        self._ended, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvclient-handoff", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.first = self._compute(self._begins)
        except BaseException as error:
            self._error = error
            return
        finally:
            self._ended.set()
            self.begun.set()
        with contextlib.suppress(KVClientError):  # the store is gone, and with it what was held
            self._hold(self._over, self.inside)

    def _begins(self, inside: bytes) -> None:
        self.inside = inside
        self.begun.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it ended within so many seconds. Raises what the prefill raised."""
        ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return ended

    @property
    def held(self) -> bool:
        """Whether its blocks are still held for the decoder."""
        return self._thread.is_alive()

    def release(self) -> None:
        """Gives the blocks back without waiting for the decoder."""
        self._over.set()
        if self._ended.is_set():
            self._thread.join()
