"""What comes to stay in memory: tensors outside of the layers, and the layers' parts that are not streamed.

Owns the threads that read ahead, until the last of it is there. Never puts a tensor into the model.
Invariant: whoever asks for a part gets its bytes or an error, and what failed is read anew for the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from kvclient.errors import Closed
from kvclient.hf.streaming.files.headers import Source
from kvclient.hf.streaming.files.index import Part
from kvclient.hf.streaming.frame import read
from kvclient.hf.streaming.mover import pages
from kvclient.hf.streaming.scheduler import Mover, Scheduler
from kvclient.hf.streaming.weights.vocabulary import fill

READ_AHEAD = 2  # parts at one time: the second one's reads stand behind the first one's

Told = Callable[[int, int], None]
Key = tuple[int, str]  # a layer and a part's name


class Loading:
    """From begin() on what a pass begins with comes into the slots, and beside it the parts that stay as they
    are read, in their order, by threads of its own. Parts that are copied are read when they are asked for,
    as their copies take memory. Tells of the bytes that came, and of all that will. told: None, nobody asks.
    """

    def __init__(
        self, told: Told | None, outside: dict[str, Source], mover: Mover, parts: dict[Key, Part],
        ahead: Callable[[Part], bool], scheduler: Callable[[], Scheduler | None],
    ) -> None:  # fmt: skip
        """parts: those that stay, by layer and name; ahead: whether one stays as it is read; scheduler: makes
        what reads the others.
        """
        self._told, self._done, self._mover, self._parts = told, 0, mover, parts
        self._whole = sum(source.length for source in outside.values())
        self._whole += sum(part.length for part in parts.values())
        self._make_scheduler = scheduler
        self.scheduler: Scheduler | None = None  # from begin() on
        self._begun = False
        ahead_of = [key for key, part in parts.items() if ahead(part)]
        self._left = deque(ahead_of)
        self._coming: dict[Key, Future[memoryview]] = {key: Future() for key in ahead_of}
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Reads from here on; once, however often it is called."""
        if self._begun:
            return
        self._begun = True
        self.tell(0)
        self.scheduler = self._make_scheduler()
        for i in range(min(READ_AHEAD, len(self._left))):
            thread = threading.Thread(target=self._run, name=f"kvclient-loading-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, failure: object, *_where: object) -> None:
        """Where loading failed the mover is closed, which ends what is still being read for nobody."""
        if failure is not None:
            self.end(self._mover if self.scheduler is None else self.scheduler)

    def end(self, closed: Mover | Scheduler) -> None:
        """Closes what it reads by, and gives up what has not come; who waits for a part is told so."""
        closed.close()
        while (key := self._next()) is not None:
            if (coming := self._coming.get(key)) is not None:
                coming.set_exception(Closed("the model's streams were closed"))
        for thread in self._threads:
            thread.join()

    def _next(self) -> Key | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def _run(self) -> None:
        while (key := self._next()) is not None:
            coming = self._coming[key]
            try:
                coming.set_result(self._fill(key))
            except BaseException as error:  # whoever asks for the part gets it
                coming.set_exception(error)

    def _fill(self, key: Key) -> memoryview:
        part = self._parts[key]
        held = pages(part.length)
        fill(self._mover, key[0], part.pieces, held)
        return held

    def comes(self, number: int, name: str) -> bool:
        """Whether a layer's part is read ahead for whoever asks for it, and nobody is told how far it is."""
        return self._told is None and (number, name) in self._coming

    def is_there(self, number: int, name: str) -> bool:
        """Whether a layer's part was read ahead and waits in memory for whoever asks for it."""
        coming = self._coming.get((number, name))
        return coming is not None and coming.done() and coming.exception() is None

    def part(self, number: int, name: str) -> memoryview:
        """The bytes of a layer's part, once. Raises StreamingFailed, and Closed."""
        key = number, name
        coming = self._coming.get(key)
        try:
            found = self._fill(key) if coming is None else coming.result()
        except Exception:
            self._coming.pop(key, None)  # the next one reads it anew
            raise
        self._coming.pop(key, None)
        self.tell(self._parts[key].length)
        return found

    def read(self, source: Source) -> torch.Tensor:
        """The tensor, of the source's shape, as read() gives it."""
        found = read(source)
        self.tell(source.length)
        return found

    def tell(self, length: int) -> None:
        """So many bytes more are there."""
        self._done += length
        if self._told is not None:
            self._told(self._done, self._whole)
