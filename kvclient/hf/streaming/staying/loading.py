"""What comes to stay in memory: tensors outside of the layers, the layers' parts that are not streamed, and
embedding and head as parts round them.

Owns the threads that read ahead, until the last of it is there. Never puts a tensor into the model.
Invariant: whoever asks for a part gets its bytes or an error, and what failed is read anew for the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future

import torch

from kvclient.errors import Closed
from kvclient.hf.streaming.files.headers import Source
from kvclient.hf.streaming.files.index import Part
from kvclient.hf.streaming.frame import read
from kvclient.hf.streaming.mover import pages
from kvclient.hf.streaming.scheduler import Mover, Scheduler
from kvclient.hf.streaming.weights.vocabulary import fill

READ_AHEAD = 2  # pieces at one time: the second one's reads stand behind the first one's

Told = Callable[[int, int], None]
Key = tuple[int, str]  # a layer and a part's name


def _memory(part: Part) -> memoryview:
    """Where a part that stays lies. A table is read once, and may be a gigabyte: of small pages a host that
    takes free memory back has many left, of huge ones few, and each that it brings again costs a first token.
    """
    return pages(part.length, huge=len(part.pieces) == 1)


class _Coming:
    """A part that is read ahead, whose pieces come in any order; memory: from the first of them on."""

    def __init__(self, part: Part) -> None:
        self.whole: Future[memoryview] = Future()
        self._part, self._left, self._lock = part, len(part.pieces), threading.Lock()
        self._memory: memoryview | None = None

    def place(self, i: int) -> memoryview:
        """Where its i-th piece belongs."""
        with self._lock:
            if self._memory is None:
                self._memory = _memory(self._part)
        at = sum(piece.length for piece in self._part.pieces[:i])
        return self._memory[at : at + self._part.pieces[i].length]

    def came(self) -> None:
        """One piece more is in its place; of each once."""
        with self._lock:
            self._left -= 1
            if not self._left:
                assert self._memory is not None
                self.whole.set_result(self._memory)

    def failed(self, error: BaseException) -> None:
        """Whoever asks for the part gets it; its other pieces are read for nobody."""
        with self._lock:
            if not self.whole.done():
                self.whole.set_exception(error)


class Loading:
    """From begin() on what a pass begins with comes into the slots, and beside it the parts that stay as they
    are read, in their order, by threads of its own. Parts that are copied are read when they are asked for,
    as their copies take memory. Tells of the bytes that came, and of all that will. told: None, nobody asks.
    """

    def __init__(
        self, told: Told | None, outside: dict[str, Source], mover: Mover, parts: dict[Key, Part],
        ahead: Callable[[Part], bool], scheduler: Callable[[], Scheduler | None], late: Collection[int] = (),
    ) -> None:  # fmt: skip
        """parts: those that stay, by layer and name; ahead: whether one stays as it is read; scheduler: makes
        what reads the others. late: layers that are read only once resume() is called, or one is asked for.
        """
        self._told, self._done, self._mover, self._parts = told, 0, mover, parts
        self._whole = sum(source.length for source in outside.values())
        self._whole += sum(part.length for part in parts.values())
        self._make_scheduler = scheduler
        self.scheduler: Scheduler | None = None  # from begin() on
        self._begun = False
        self._coming = {key: _Coming(part) for key, part in parts.items() if ahead(part)}
        units = [(key, i) for key in self._coming for i in range(len(parts[key].pieces))]
        self._later = [unit for unit in units if unit[0][0] in late and told is None]  # until resume()
        self._left = deque(unit for unit in units if unit not in self._later)
        self._lock = threading.Lock()  # of both
        self._threads: list[threading.Thread] = []
        self._readers = 0  # of them that still read

    def begin(self) -> None:
        """Reads from here on; once, however often it is called."""
        if self._begun:
            return
        self._begun = True
        self.tell(0)
        self.scheduler = self._make_scheduler()
        self._start()

    def _start(self) -> None:
        """Those threads that what is left lacks. Raises RuntimeError where none reads and none can be had."""
        with self._lock:
            while self._readers < min(READ_AHEAD, len(self._left)):
                name = f"kvclient-loading-{self._readers}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._readers:
                        raise
                    return
                self._readers += 1
                self._threads.append(thread)

    def put_off(self, numbers: Collection[int]) -> set[int]:
        """Which of these layers wait for resume(): those that were late, unless somebody has asked for one.
        What was late and is not among them is read now.
        """
        with self._lock:
            found = {unit[0][0] for unit in self._later} & set(numbers)
            self._left.extend(unit for unit in self._later if unit[0][0] not in found)
            self._later = [unit for unit in self._later if unit[0][0] in found]
        self._start()
        return found

    def resume(self) -> None:
        """What was put off is read from here on."""
        with self._lock:
            self._left.extend(self._later)
            self._later = []
        self._start()

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, failure: object, *_where: object) -> None:
        """Where loading failed the mover is closed, which ends what is still being read for nobody."""
        if failure is not None:
            self.end(self._mover if self.scheduler is None else self.scheduler)

    def end(self, closed: Mover | Scheduler) -> None:
        """Closes what it reads by, and gives up what has not come; who waits for a part is told so."""
        closed.close()
        with self._lock:
            self._left.extend(self._later)
            self._later = []
            left, threads = list(self._left), list(self._threads)
            self._left.clear()
        for key, _ in left:
            if (coming := self._coming.get(key)) is not None:
                coming.failed(Closed("the model's streams were closed"))
        for thread in threads:
            thread.join()

    def _next(self) -> tuple[Key, int] | None:
        """Of a thread that reads, which ends where there is none."""
        with self._lock:
            if self._left:
                return self._left.popleft()
            self._readers -= 1
            return None

    def _run(self) -> None:
        while (unit := self._next()) is not None:
            key, i = unit
            coming = self._coming.get(key)
            if coming is None or coming.whole.done():
                continue  # another piece of it failed
            try:
                fill(self._mover, key[0], self._parts[key].pieces[i : i + 1], coming.place(i))
            except BaseException as error:  # whoever asks for the part gets it
                coming.failed(error)
            else:
                coming.came()

    def _fill(self, key: Key) -> memoryview:
        part = self._parts[key]
        held = _memory(part)
        fill(self._mover, key[0], part.pieces, held)
        return held

    def comes(self, number: int, name: str) -> bool:
        """Whether a layer's part is read ahead for whoever asks for it, and nobody is told how far it is."""
        return self._told is None and (number, name) in self._coming

    def is_there(self, number: int, name: str) -> bool:
        """Whether a layer's part was read ahead and waits in memory for whoever asks for it."""
        coming = self._coming.get((number, name))
        return coming is not None and coming.whole.done() and coming.whole.exception() is None

    def part(self, number: int, name: str) -> memoryview:
        """The bytes of a layer's part, once. Raises StreamingFailed, and Closed."""
        key = number, name
        coming = self._coming.get(key)
        try:
            if any(unit[0] == key for unit in self._later):
                self.resume()
            elif coming is not None and not coming.whole.done():
                self._start()  # Ctrl-C may have come before
            found = self._fill(key) if coming is None else coming.whole.result()
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
