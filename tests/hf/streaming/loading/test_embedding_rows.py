"""Proves that an embedding of which rows are read takes no more memory than was said, whatever is looked up.

Method: rows of one block each, the limit at eight of them; the kernel says which pages are there (mincore).
"""

import ctypes
import threading

import pytest
import torch

from kvclient.hf.streaming import Admission, StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.files.index import BLOCK_BYTES, Table
from kvclient.hf.streaming.mover import PAGE, Piece
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.weights import vocabulary
from kvclient.hf.streaming.weights.vocabulary import StreamedEmbedding

ROWS, MOST = 64, 8


class Numbered:
    """Each row has its number."""

    def fill(self, _layer, pieces, slot):
        at = pieces[0].offset // BLOCK_BYTES
        torch.frombuffer(slot, dtype=torch.float32).fill_(at)


def there(embedding):
    """Bytes of its memory that have pages."""
    memory = (ctypes.c_char * len(embedding._memory)).from_buffer(embedding._memory)
    found = (ctypes.c_ubyte * (len(embedding._memory) // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.byref(memory), ctypes.c_size_t(len(memory)), found) == 0
    return sum(each & 1 for each in found) * PAGE


@pytest.fixture
def embedding(monkeypatch):
    monkeypatch.setattr(vocabulary, "ROWS_BYTES", MOST * BLOCK_BYTES)
    width = BLOCK_BYTES // 4
    whole = Piece(0, ROWS * BLOCK_BYTES, None)
    table = Table("rows", "float32", (ROWS, width), 0, whole.length, ROWS, (whole,), (0,) * ROWS)
    module = torch.nn.Embedding(1, 1)
    return module, StreamedEmbedding(module, table, Numbered(), 0)


def test_rows_that_were_read_before_make_room(embedding):
    module, rows = embedding
    for first in (0, MOST // 2, MOST, 3 * MOST, 0):
        asked = torch.arange(first, first + MOST)
        assert torch.equal(module(asked)[:, 0], asked.float())
        assert there(rows) == MOST * BLOCK_BYTES
    read = rows.bytes
    assert torch.equal(module(torch.arange(MOST))[:, 0], torch.arange(MOST).float())
    assert rows.bytes == read  # those that are asked for again stay


def test_more_at_one_time_take_what_was_said_and_are_given_back(embedding):
    module, rows = embedding
    assert torch.equal(module(torch.arange(3 * MOST))[:, 0], torch.arange(3 * MOST).float())
    assert there(rows) == MOST * BLOCK_BYTES + rows.beyond(3 * MOST)
    module(torch.tensor([5]))
    assert there(rows) == BLOCK_BYTES
    assert rows.beyond(MOST) == 0 and rows.beyond(1000) == (ROWS - MOST) * BLOCK_BYTES


def test_rows_of_two_calls_at_one_moment_are_counted_as_both_take(embedding):
    """Each was allowed what the plan holds once: 32 MiB of rows more than that."""
    module, rows = embedding
    inside, may_end = threading.Event(), threading.Event()

    def within(*_):
        if threading.current_thread() is thread:
            inside.set()
            assert may_end.wait(60)

    module.register_forward_pre_hook(within)
    thread = threading.Thread(target=lambda: module(torch.arange(MOST)))
    thread.start()
    try:
        assert inside.wait(60)
        module(torch.arange(MOST, 2 * MOST))
        both = there(rows)
    finally:
        may_end.set()
        thread.join()
    assert both == 2 * MOST * BLOCK_BYTES
    assert both == MOST * BLOCK_BYTES + rows.beyond(MOST, rows.rows_bytes(MOST))
    assert rows.beyond(2 * ROWS, rows.rows_bytes(ROWS // 2)) == rows.beyond(ROWS)  # all there are


def test_rows_make_room_though_somebody_always_looks_some_up(embedding):
    """Each call begins while the one before, of another thread, has not ended: what neither needs goes."""
    module, rows = embedding
    inside = threading.local()
    module.register_forward_pre_hook(lambda *_: inside.within())

    def call(i, begun, may_end):
        def within():
            begun.set()
            assert may_end.wait(60)

        inside.within = within
        asked = torch.arange(2 * i, 2 * i + 2)
        right.append(torch.equal(module(asked)[:, 0], asked.float()))

    right, before = [], None
    for i in range(ROWS // 2):
        begun, may_end = threading.Event(), threading.Event()
        thread = threading.Thread(target=call, args=(i, begun, may_end))
        thread.start()
        assert begun.wait(60)
        assert there(rows) <= MOST * BLOCK_BYTES
        if before is not None:
            before[1].set()
            before[0].join(60)
        before = thread, may_end
    before[1].set()
    before[0].join(60)
    assert right == [True] * (ROWS // 2)


def test_an_estimate_counts_them(tmp_path, checkpoint, monkeypatch):
    whole = StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_stream"))
    less = StreamingConfig(residency="full_stream", memory=streams_of(whole).plan.bytes - 1)
    model = StreamingCausalLM.from_pretrained(checkpoint, less)
    assert streams_of(whole).embedding is None is not streams_of(model).embedding
    monkeypatch.setattr(vocabulary, "ROWS_BYTES", 0)
    said = [Admission(each, memory=1 << 40, chunk=16).estimate(40, 2) for each in (model, whole)]
    more = streams_of(model).embedding.beyond(16)
    assert more > 0 and said[0].activations - said[1].activations == more
    beside = Admission(model, memory=1 << 40, chunk=16).of_pieces(16, 1 << 40, said[0].activations)
    assert beside.rows(40) == more and beside.estimate(40, 2).activations <= said[0].activations
    for each in (model, whole):
        streams_of(each).close()
