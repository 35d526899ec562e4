"""Proves that no order of events makes a slot be filled while somebody computes from it, lose a slot, or wait
for ever.

Method: the table of slots (slots.py) moved by simulated readers and movers, one step at a time in an order
drawn by a seed; readers are cancelled, raise inside a layer, jump; reads fail. Content is a number that each
fill makes anew. The same with the rule broken shows that the simulation notices. Then real threads.
"""

import contextlib
import random
import threading

import pytest

from kvclient.errors import Closed
from kvclient.hf.streaming import StreamingFailed
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.scheduler import Scheduler
from kvclient.hf.streaming.slots import Slot, SlotTable

MOST_STEPS = 20_000


class Simulation:
    """Steps are drawn; a step that cannot be made now is not offered."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.layers = self.dice.randint(1, 9)
        slots = min(self.layers, self.dice.randint(2, 4))
        self.table = SlotTable([Slot(i, memoryview(b"")) for i in range(slots)], range(self.layers),
                               self.dice.randint(0, slots))  # fmt: skip
        self.content = [-1] * slots  # what lies in each, as (fill, layer)
        self.fills = 0
        self.movers: list[tuple[int, Slot] | None] = [None] * self.dice.randint(1, 3)
        self.readers = [self.reader() for _ in range(self.dice.randint(1, 3))]
        self.waiting = [next(reader, None) for reader in self.readers]  # each: whether it can go on
        self.failures = 0

    def reader(self):
        """One generate(): passes over the layers. Yields what tells whether it can go on."""
        for _ in range(self.dice.randint(1, 3)):
            for layer in range(self.layers):
                if self.dice.random() < 0.05:
                    continue  # a layer that this pass leaves out
                self.table.ask(layer)
                try:
                    cancelled = self.dice.random() < 0.03
                    slot = None
                    while slot is None:
                        yield lambda layer=layer, off=cancelled: off or self.there(layer)
                        if cancelled:
                            return
                        slot = self.table.take(layer)
                except StreamingFailed:
                    self.failures += 1
                    return
                finally:
                    self.table.leave(layer)
                before = self.content[slot.number]
                try:
                    assert slot.ready and before[1] == layer
                    for _ in range(self.dice.randint(0, 3)):
                        yield lambda: True
                        assert self.content[slot.number] == before, "filled while it was computed from"
                    if self.dice.random() < 0.03:
                        return  # an exception inside of the layer
                finally:
                    self.table.release(slot)

    def there(self, layer: int) -> bool:
        table = self.table
        return layer in table._failed or any(s.layer == layer and s.ready for s in table.slots)

    def moves(self) -> list:
        found = [lambda i=i: self.read(i) for i, ready in enumerate(self.waiting) if ready and ready()]
        for i, moving in enumerate(self.movers):
            found.append((lambda i=i: self.end(i)) if moving else (lambda i=i: self.begin(i)))
        return found

    def read(self, i: int) -> None:
        self.waiting[i] = next(self.readers[i], None)

    def begin(self, i: int) -> None:
        if (found := self.table.begin()) is None:
            return
        assert found[1].users == 0, "filled while it was computed from"
        self.movers[i], self.fills = found, self.fills + 1
        self.content[found[1].number] = (self.fills, None)  # half of it is there

    def end(self, i: int) -> None:
        layer, slot = self.movers[i]
        self.movers[i] = None
        failed = self.dice.random() < 0.05
        self.content[slot.number] = (self.content[slot.number][0], None if failed else layer)
        self.table.filled(slot, StreamingFailed("file", layer, 0, "drawn") if failed else None)

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            if not any(self.waiting):
                break
            self.dice.choice(self.moves())()
        assert not any(self.waiting), "somebody waits for ever"
        for i, moving in enumerate(self.movers):
            if moving:
                self.end(i)
        assert all(slot.users == 0 and slot.free() for slot in self.table.slots) and not self.table._asked


def simulate(seeds) -> int:
    failures = 0
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            simulation.run()
        except AssertionError as error:
            for reader in simulation.readers:  # what they would do when they are collected, wherever that is
                with contextlib.suppress(AssertionError):
                    reader.close()
            raise AssertionError(f"seed {seed}: {error}") from error
        failures += simulation.failures
    return failures


def test_interleavings_give_every_slot_back():
    assert simulate(range(1500)) > 100  # reads that failed are among them


@pytest.mark.slow
def test_ten_thousand_interleavings():
    simulate(range(10_000, 20_000))


@pytest.mark.parametrize("broken", ["users are not looked at", "what was asked for is not kept"])
def test_the_simulation_notices_a_broken_rule(monkeypatch, broken):
    if broken.startswith("users"):
        monkeypatch.setattr(Slot, "free", lambda self: self.ready or self.layer is None)
    else:
        monkeypatch.setattr(SlotTable, "release", lambda self, slot: None)
    with pytest.raises(AssertionError, match="seed"):
        simulate(range(200))


class Numbered:
    """Fills a slot with its layer's number; every seventh read fails."""

    def __init__(self):
        self.count, self.lock, self.closed = 0, threading.Lock(), False

    def fill(self, layer, pieces, slot):
        with self.lock:
            self.count += 1
            failed = self.count % 7 == 0
        slot[:] = bytes([255]) * len(slot)
        if failed:
            raise StreamingFailed("file", layer, 0, "the seventh")
        slot[:] = bytes([layer]) * len(slot)

    def close(self):
        self.closed = True


def test_threads_see_their_layer_and_nothing_else():
    """Three threads, each over all layers, some leaving in the middle of a layer by an exception."""
    mover = Numbered()
    scheduler = Scheduler(mover, {n: (Piece(0, 4096, 0),) for n in range(7)}, slots=3, ahead=2)
    wrong, failed = [], []

    def passes(seed):
        dice = random.Random(seed)
        for _ in range(40):
            for layer in range(7):
                try:
                    with scheduler.holding(layer) as slot:
                        if slot.memory[dice.randrange(4096)] != layer or slot.layer != layer:
                            wrong.append(layer)
                        if dice.random() < 0.1:
                            raise ValueError
                except ValueError:
                    pass
                except StreamingFailed as error:
                    failed.append(error)

    threads = [threading.Thread(target=passes, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong and scheduler.retries > 10
    assert all(slot.users == 0 for slot in scheduler.slots)
    scheduler.close()
    assert mover.closed
    with pytest.raises(Closed), scheduler.holding(0):
        pass
