"""Proves that a layer on its way from a device to a block is told of when its bytes are there, and that what
is given back or sealed is nobody's to write.

Method: tests.kernels.test_transfer's library, whose copies happen when somebody waits for them and not
before, under the blocks of a real client; a layer that was told of too early, or a block that was given back
under a copy, shows in the bytes.
"""

import threading

import numpy as np
import pytest
import torch

import kvclient
from kvclient.hf.call import Clock
from kvclient.hf.connector import outgoing
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.save import Publisher
from kvclient.kernels import contract
from kvclient.kernels.transfer import extent
from tests.kernels.test_transfer import LateLibrary

LAYERS, HEADS, WIDTH, TOKENS = 3, 2, 8, 16


class FromTheDevice(LateLibrary):
    """The other way: what must be pinned is where the bytes go."""

    def kvk_copy(self, targets, sources, sizes, count, stream):
        return super().kvk_copy(sources, targets, sizes, count, stream) or self._turn(stream, count)

    def kvk_event_record(self, event, stream):
        return super().kvk_event_record(event, stream) if stream else contract.OK  # the model's is done

    def _turn(self, stream, count):
        queued = self.streams[stream]
        queued[-count:] = [(source, target, size) for target, source, size in queued[-count:]]
        return contract.OK


@pytest.fixture
def library(monkeypatch):
    made = FromTheDevice()
    monkeypatch.setattr(contract, "cuda", lambda: made)
    monkeypatch.setattr(contract, "cuda_lacks", lambda device=0: None)
    monkeypatch.setattr(outgoing, "DEVICES", ("cpu",))
    monkeypatch.setattr(outgoing, "SLOT_BYTES", 3000)  # a row takes more, and ends inside of one
    monkeypatch.setattr(outgoing, "_spare", [])
    yield made
    assert not made.streams and not made.events
    assert len(made.pinned) == len(outgoing._spare) <= outgoing.MOST_SPARE


@pytest.fixture
def publisher():
    client = kvclient.InMemoryClient()
    form = BlockFormat(LAYERS, HEADS, WIDTH, torch.float32)
    layout = client.register_layout(form.layout(TOKENS))
    chain = kvclient.Chain(b"m" * 32, list(range(4 * TOKENS)), TOKENS)
    return Publisher(client, layout, LAYERS, 0, None, Clock(), form), client, chain


def storage(layer):
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(2, 1, HEADS, 4 * TOKENS, WIDTH, generator=generator)


def test_a_layer_is_told_of_when_it_is_there(library, publisher, monkeypatch):
    writer, client, chain = publisher
    monkeypatch.setattr(outgoing, "MOST_BYTES", 1)  # who sends waits
    writer.claim(chain, 0, 0, 0)
    followed = client.get(chain, follow=True)
    for layer in range(LAYERS):
        writer.written(layer, 0, 4 * TOKENS, storage(layer), 0)
        assert [slot.layers for slot in writer._slots] == [layer + 1] * 4
        for view, start in zip(followed, range(0, 4 * TOKENS, TOKENS), strict=True):
            view.wait_layer(layer, 60)
            wanted = storage(layer)[:, 0, :, start : start + TOKENS]
            assert np.array_equal(view.layer(layer), wanted)
    followed.release()
    writer.seal()
    found = client.get(chain)
    for number, view in enumerate(found):
        assert view.sealed
        for layer in range(LAYERS):
            part = storage(layer)[:, 0, :, number * TOKENS : (number + 1) * TOKENS]
            assert np.array_equal(view.layer(layer), part)
    writer.abort()


def test_who_sends_does_not_wait(library, publisher, monkeypatch):
    """The model goes on; no layer is told of before its turn."""
    writer, client, chain = publisher
    going, told = threading.Event(), library.kvk_event_synchronise
    monkeypatch.setattr(library, "kvk_event_synchronise", lambda event: (going.wait(60), told(event))[1])
    writer.claim(chain, 0, 0, 0)
    for layer in range(LAYERS):
        writer.written(layer, 0, 4 * TOKENS, storage(layer), 0)
        assert [slot.layers for slot in writer._slots] == [0] * 4
    going.set()
    writer.seal()
    for number, view in enumerate(client.get(chain)):
        part = storage(1)[:, 0, :, number * TOKENS : (number + 1) * TOKENS]
        assert np.array_equal(view.layer(1), part)


def test_what_is_given_back_is_written_by_nobody(library, publisher):
    writer, client, chain = publisher
    writer.claim(chain, 0, 0, 0)
    memory = [slot.block.layer(0) for slot in writer._slots]
    writer.written(0, 0, 4 * TOKENS, storage(0), 0)
    writer.abort()
    assert not library.streams and all(part.any() for part in memory)
    assert client.lookup(chain).resident == 0


def test_slots_are_used_again(library, publisher):
    writer, client, _ = publisher
    for number in range(5):
        other = kvclient.Chain(bytes([number]) * 32, list(range(4 * TOKENS)), TOKENS)
        writer.publish(other, 0, 0, 0, [(layer, storage(layer), 0) for layer in range(LAYERS)])
        assert client.lookup(other).resident == 4
    assert len(library.pinned) == outgoing.SLOTS


def test_a_row_that_begins_inside_a_block_goes_token_by_token(library, publisher):
    writer, client, chain = publisher
    writer.claim(chain, 0, 0, 0)
    whole = [storage(layer) for layer in range(LAYERS)]
    for start, stop in ((0, 40), (40, 4 * TOKENS)):
        for layer in range(LAYERS):
            writer.written(layer, start, stop, whole[layer], 0)
    writer.seal()
    for number, view in enumerate(client.get(chain)):
        for layer in range(LAYERS):
            part = whole[layer][:, 0, :, number * TOKENS : (number + 1) * TOKENS]
            assert np.array_equal(view.layer(layer), part)
    assert extent(view.layer(0))[1] == 2 * HEADS * TOKENS * WIDTH * 4
