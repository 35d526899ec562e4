"""Proves that rows go to the host and results come back whole, in every order in which a device may do what
it was asked for.

Method: the stand-in of test_device.py, whose streams are queues; memory that both sides see is written and
read by operations in them, in two steps each. Calls come from two streams, so that one takes the memory of
which another's results are still to be read. The same with a wait left out shows that the stand-in notices.
"""

import random

import pytest
import torch

from kvclient.hf.streaming.device.exchange import Exchange
from tests.hf.streaming.device.test_device import StandIn, Stream, run_to_the_end

INPUTS, OUTPUTS, MOST = 6, 4, 3


class Seen:
    """The host's memory as the device has it: what is done to it stands in the current stream."""

    def __init__(self, runtime, memory):
        self.runtime, self.memory = runtime, memory

    def __getitem__(self, part):
        return Seen(self.runtime, self.memory[part])

    def view(self, *shape):
        return Seen(self.runtime, self.memory.view(*shape))

    def copy_(self, source):
        self._in_halves(self.memory, source.clone())

    def to(self, kind):
        found = torch.full(self.memory.shape, -1, dtype=kind)
        self._in_halves(found, self.memory)
        return found

    def _in_halves(self, into, source):
        def half(part):
            into.flatten()[part] = source.flatten()[part].to(into.dtype)
            return True

        middle = into.numel() // 2
        queue = self.runtime.current_stream().queue
        queue.extend(lambda part=part: half(part) for part in (slice(middle), slice(middle, None)))


class Host(StandIn):
    """Who waits sees the device do the one or the other."""

    def __init__(self, seed):
        super().__init__()
        self.dice, self.pinned_bytes = random.Random(seed), 0

    def pinned(self, length):
        self.pinned_bytes += length
        return torch.zeros(length, dtype=torch.uint8)

    def mapped(self, tensor):
        return Seen(self, tensor)

    def some(self):
        left = [stream for stream in self.streams if stream.queue]
        return any(stream.step() for stream in self.dice.sample(left, len(left)))

    def wait(self, event):
        while not event.query():
            assert self.some()


def doubled(rows, out):
    out[:] = 2 * rows[:, :OUTPUTS] + 1


def calls(seed, failing=()):
    """Some, from two streams. Raises AssertionError for results that are not those of their rows."""
    runtime = Host(seed)
    exchange = Exchange(runtime, MOST, INPUTS, OUTPUTS)
    streams, found = [runtime.Stream() for _ in range(2)], []
    for number in range(12):
        count = runtime.dice.randint(1, MOST)
        x = torch.full((1, count, INPUTS), number + 1, dtype=torch.float16)

        def fails(rows, out):
            out[:] = -2
            raise RuntimeError("stop")

        with runtime.stream(runtime.dice.choice(streams)):
            if number in failing:
                with pytest.raises(RuntimeError, match="stop"):
                    exchange.multiplied(x, OUTPUTS, fails)
                continue
            found.append((2 * (number + 1) + 1, exchange.multiplied(x, OUTPUTS, doubled)))
            assert found[-1][1].shape == (1, count, OUTPUTS) and found[-1][1].dtype == torch.float16
        for _ in range(runtime.dice.randint(0, 3)):
            runtime.some()
    run_to_the_end(runtime)
    for wanted, results in found:
        assert bool((results == wanted).all()), f"seed {seed}: {results} and not {wanted}"
    assert len(exchange._free) == 1 and runtime.pinned_bytes == 4 * MOST * (INPUTS + OUTPUTS)


def test_results_are_those_of_their_rows_in_every_order():
    for seed in range(300):
        calls(seed)


def test_a_product_that_fails_leaves_its_memory_to_others():
    for seed in range(100):
        calls(seed, failing={1, 4, 5})


@pytest.mark.parametrize("left_out", ["of the host for rows", "of rows for results before them"])
def test_a_wait_that_is_left_out_shows(monkeypatch, left_out):
    if left_out == "of the host for rows":
        monkeypatch.setattr(Host, "wait", lambda self, event: None)
    else:
        monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError, match="and not"):
        for seed in range(200):
            calls(seed)
