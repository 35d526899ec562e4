"""Proves that on a device a slot is written only behind what computes from it, and computed from only behind
the copies into it, in every order in which the device may do what it was asked for.

Method: no device. A stand-in for torch.cuda has streams that are queues; their next operations are done in an
order drawn by a seed, copies and products in two steps each, so that what may overlap does. The host runs
ahead, as with a real one. The same with one wait left out shows that the stand-in notices, for each of both.
On a device: tests/gpu/models/test_streamed.py.
"""

import contextlib
import random
import threading
from collections import deque

import pytest
import torch

from kvclient.hf.streaming.device import DeviceMover
from kvclient.hf.streaming.mover import Piece, StreamingFailed
from kvclient.hf.streaming.scheduler import Scheduler
from tests.hf.streaming.test_slots import MOST_STEPS, Simulation

LENGTH, MOST_LAYERS = 8, 9  # of each of a layer's two pieces


class Event:
    come = False

    def query(self):
        return self.come

    def elapsed_time(self, _other):
        return 0.0


class Stream:
    def __init__(self):
        self.queue = deque()

    def wait_event(self, event):
        self.queue.append(event.query)  # stays at the head until it is true

    def record_event(self, event):
        def recorded():
            event.come = True
            return True

        self.queue.append(recorded)
        return event

    def step(self):
        """Does the next operation, if it can be done. Whether it was."""
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        return True


class StandIn:
    """What of torch.cuda is used. One stream for all who compute, as a thread has its own in torch."""

    def __init__(self):
        self.streams, self._own = [], threading.local()

    def Stream(self):
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self):
        if not hasattr(self._own, "stream"):
            self._own.stream = self.Stream()
        return self._own.stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._own.stream = self.current_stream(), stream
        yield
        self._own.stream = before

    def event(self):
        return Event()

    def memory(self, length):
        return Memory(self, bytearray(b"\xff" * length), 0, length)

    def kept_for(self, memory, stream):
        assert stream in self.streams
        return memory

    def computes(self, slot, layer):
        """A product, in the calling thread's stream: looks at the slot as it begins and as it ends."""
        wanted = bytes([layer]) * (2 * LENGTH)

        def look():
            assert bytes(slot.data) == wanted, f"layer {layer} computed from {bytes(slot.data)!r}"
            return True

        self.current_stream().queue.extend([look, look])


class Memory:
    def __init__(self, runtime, data, start, stop):
        self.runtime, self.data, self.start, self.stop = runtime, data, start, stop

    def data_ptr(self):
        return id(self.data)

    def __getitem__(self, part):
        return Memory(self.runtime, self.data, self.start + part.start, self.start + part.stop)

    def copy_(self, source, non_blocking):
        assert non_blocking
        kept, middle = bytes(source.tolist()), (self.start + self.stop) // 2

        def half(start, stop):
            self.data[start:stop] = kept[start - self.start : stop - self.start]
            return True

        halves = ((self.start, middle), (middle, self.stop))
        self.runtime.current_stream().queue.extend([lambda h=h: half(*h) for h in halves])


def layers(count):
    image = torch.arange(count, dtype=torch.uint8).repeat_interleave(2 * LENGTH)
    pieces = {n: tuple(Piece((2 * n + i) * LENGTH, LENGTH, None) for i in range(2)) for n in range(count)}
    return image, pieces


class OnDevice(Simulation):
    """Readers ask for products and go on; what the device does next is drawn too."""

    def __init__(self, seed):
        super().__init__(seed)
        image, self.pieces = layers(self.layers)
        self.runtime = StandIn()
        self.mover = DeviceMover(image, self.runtime.memory, self.runtime)
        for slot in self.table.slots:
            slot.memory = self.mover.memory(2 * LENGTH)
        self.readers = [self.pass_of(self.runtime.Stream()) for _ in self.readers]
        self.waiting = [next(reader, None) for reader in self.readers]

    def pass_of(self, stream):
        for layer in range(self.layers):
            if self.dice.random() < 0.05:
                continue
            self.table.ask(layer)
            try:
                while True:
                    yield lambda layer=layer: self.there(layer)
                    with contextlib.suppress(StreamingFailed):
                        if (slot := self.table.take(layer)) is not None:
                            break
                    return
            finally:
                self.table.leave(layer)
            with self.runtime.stream(stream):
                self.mover.taken(slot.memory)
                self.runtime.computes(slot.memory, layer)
            yield lambda: True
            with self.runtime.stream(stream):
                if self.dice.random() < 0.5:
                    self.runtime.computes(slot.memory, layer)
                self.mover.given_back(slot.memory)
            self.table.release(slot)

    def moves(self):
        return super().moves() + [stream.step for stream in self.runtime.streams if stream.queue]

    def end(self, i):
        layer, slot = self.movers[i]
        self.movers[i] = None
        if failed := self.dice.random() < 0.05:
            error = StreamingFailed("memory", layer, 0, "drawn")
        else:
            self.mover.fill(layer, self.pieces[layer], slot.memory)
        self.table.filled(slot, error if failed else None)

    def run(self):
        super().run()
        for _ in range(MOST_STEPS):
            left = [stream for stream in self.runtime.streams if stream.queue]
            if not left:
                return
            assert any(stream.step() for stream in left), "streams wait for each other"


def simulate(seeds):
    for seed in seeds:
        try:
            OnDevice(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_device_computes_from_whole_layers_in_every_order():
    simulate(range(250))


@pytest.mark.slow
def test_ten_thousand_orders():
    simulate(range(10_000, 20_000))


@pytest.mark.parametrize("left_out", ["of the copies for who computes", "of who computes for the copies"])
def test_the_stand_in_notices_a_wait_that_is_left_out(monkeypatch, left_out):
    if left_out.startswith("of the copies"):
        monkeypatch.setattr(DeviceMover, "given_back", lambda self, slot: None)
    else:
        monkeypatch.setattr(DeviceMover, "taken", lambda self, slot: None)
    with pytest.raises(AssertionError, match="computed from"):
        simulate(range(200))


def run_to_the_end(runtime):
    while left := [stream for stream in runtime.streams if stream.queue]:
        assert any(stream.step() for stream in left)


def test_a_layer_that_stays_in_its_slot_keeps_no_events():
    image, pieces = layers(2)
    runtime = StandIn()
    mover = DeviceMover(image, runtime.memory, runtime)
    scheduler = Scheduler(mover, {1: pieces[1]}, slots=2, ahead=1)
    for _ in range(50):
        with scheduler.holding(1) as slot:
            runtime.computes(slot.memory, 1)
        run_to_the_end(runtime)
    assert scheduler.loads == 1 and sum(map(len, mover._computing.values())) == 1
    scheduler.close()


def test_a_copy_that_is_interrupted_is_asked_for_again(monkeypatch):
    """Ctrl-C comes in the thread that computes, and that asks."""
    image, pieces = layers(MOST_LAYERS)
    runtime, fills, fill = StandIn(), [], DeviceMover.fill

    def interrupted(self, layer, *rest):
        fills.append(layer)
        if len(fills) == 3:
            raise KeyboardInterrupt
        fill(self, layer, *rest)

    monkeypatch.setattr(DeviceMover, "fill", interrupted)
    scheduler = Scheduler(DeviceMover(image, runtime.memory, runtime), pieces, slots=2, ahead=1)

    def run():
        for layer in pieces:
            with scheduler.holding(layer) as slot:
                runtime.computes(slot.memory, layer)

    with pytest.raises(KeyboardInterrupt):
        run()
    again = threading.Thread(target=run, daemon=True)
    again.start()
    again.join(60)
    assert not again.is_alive() and scheduler._filling == 0
    run_to_the_end(runtime)
    scheduler.close()


def test_two_threads_of_the_scheduler_each_in_a_stream_of_its_own():
    """The device is a thread too, and late."""
    image, pieces = layers(MOST_LAYERS)
    runtime = StandIn()
    scheduler = Scheduler(DeviceMover(image, runtime.memory, runtime), pieces, slots=3, ahead=2)
    dice, over, wrong = random.Random(7), threading.Event(), []

    def device():
        try:
            while True:
                left = [stream for stream in list(runtime.streams) if stream.queue]
                if over.is_set() and not left:
                    return
                for stream in dice.sample(left, len(left)):
                    stream.step()
        except AssertionError as error:
            wrong.append(error)

    def computes():
        for _ in range(20):
            for layer in pieces:
                with scheduler.holding(layer) as slot:
                    runtime.computes(slot.memory, layer)

    late = threading.Thread(target=device)
    readers = [threading.Thread(target=computes) for _ in range(2)]
    for thread in [late, *readers]:
        thread.start()
    for thread in readers:
        thread.join(60)
        assert not thread.is_alive()
    over.set()
    late.join(60)
    assert not late.is_alive() and not wrong and scheduler.loads > 20
    scheduler.close()
