"""Proves that what a call was measured to take raises what is said of later ones, only where it can have been
that call's, and no more than twice; and that calls at one moment are counted as all of them take.

Method: a tiny model under a limit, with readings of the process as the test says; the real ones once; groups
of processes whose limits lie in a made-up tree.
"""

import contextlib
import threading

import pytest
import torch

from kvclient.hf.streaming import (
    Admission,
    RequestTooLarge,
    StreamingCausalLM,
    StreamingConfig,
    streaming_stats,
)
from kvclient.hf.streaming import residency as limits
from kvclient.hf.streaming.device.runtime import Reading
from kvclient.hf.streaming.planner import asked, gauge
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.weights import vocabulary
from tests.hf.awq_checkpoint import tiny_llama

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
MUCH, TOKENS = 1 << 34, 40


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("plain")
    tiny_llama().save_pretrained(home)
    return home


@pytest.fixture
def model(home):
    made = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream", memory=MUCH))
    made(ids(8))  # its slots are touched
    yield made
    streams_of(made).close()


def ids(tokens):
    return torch.arange(1, tokens + 1)[None] % 100


@pytest.fixture
def read(monkeypatch):
    """`read(reading, reading, ...)`: what the process says from now on, None behind them."""

    def told(*readings):
        left = iter(readings)
        monkeypatch.setattr(gauge, "of_process", lambda: next(left, None))

    return told


def raised(model):
    return streaming_stats(model)["requests"]["raised"]


def test_the_process_says_what_it_holds():
    before = gauge.of_process()
    assert 0 < before.files < before.held <= before.peak
    measured = gauge.Gauge(gauge.of_process, 0)
    more = torch.ones(before.peak - before.held + (64 << 20), dtype=torch.uint8)
    taken = measured.taken()
    assert len(more) - (16 << 20) < taken < len(more) + (256 << 20)
    assert gauge.Gauge(gauge.of_process, 0).taken() is None  # no new peak: nothing is known


def test_where_nothing_is_said_nothing_is_learnt(tmp_path, monkeypatch):
    for text in (None, "VmRSS: x kB", "VmRSS: 1 kB\nVmHWM:", "VmRSS: 1 kB"):
        path = tmp_path / "status"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(gauge, "STATUS", path)
        assert gauge.of_process() is None


def test_pages_of_files_and_what_was_still_to_come_are_not_the_calls():
    readings = iter([Reading(100, 150, 20), Reading(300, 400, 60)])
    assert gauge.Gauge(lambda: next(readings), 50).taken() == 400 - 100 - 40 - 50


def test_a_call_that_took_more_raises_what_is_said_of_the_next(model, read):
    memory = asked.asked_of(model)
    working = Admission(model, MUCH, TOKENS).estimate(TOKENS, 4).working
    read(Reading(0, 1 << 30), Reading(0, 1 << 30))
    model.generate(ids(TOKENS), **OPTIONS)
    read(Reading(0, 1), Reading(0, working // 2))
    model.generate(ids(TOKENS), **OPTIONS)
    assert raised(model) == 1.0
    read(Reading(0, 1), Reading(0, working * 3 // 2))
    model.generate(ids(TOKENS), **OPTIONS)
    assert raised(model) == pytest.approx(1.5)
    memory.memory = streams_of(model).plan.bytes + working  # enough for what was said of it before
    read()
    with pytest.raises(RequestTooLarge):
        model.generate(ids(TOKENS), **OPTIONS)
    assert streaming_stats(model)["requests"]["refused"] == 1
    memory.memory = MUCH
    read(Reading(0, 1), Reading(0, 50 * working))  # whoever took that, it was not all this call's
    model.generate(ids(TOKENS), **OPTIONS)
    assert raised(model) == asked.MOST_RAISED


@pytest.mark.parametrize("first", [True, False])
def test_beside_another_call_nothing_is_learnt(model, read, first):
    """Whichever began first."""
    stands, may = threading.Event(), threading.Event()

    def listens(_ids, _scores, **_):
        stands.set()
        assert may.wait(60)
        return torch.zeros(1, dtype=torch.bool)

    other = threading.Thread(
        target=lambda: model.generate(ids(TOKENS), **OPTIONS, stopping_criteria=[listens])
    )
    read(*[Reading(0, 1 << i) for i in range(30, 40)])
    other.start()
    assert stands.wait(60)
    model.generate(ids(TOKENS), **OPTIONS)
    may.set()
    other.join()
    assert raised(model) == 1.0


@pytest.fixture
def by_rows(home, monkeypatch):
    """A model whose embedding is read row by row."""
    monkeypatch.setattr(vocabulary, "ROWS_BYTES", 0)
    whole = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))
    least = streams_of(whole).plan.bytes - 1
    streams_of(whole).close()
    model = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream", memory=least))
    yield model
    streams_of(model).close()


def test_rows_of_two_prompts_at_one_moment_are_both_counted(by_rows, monkeypatch):
    model, rows = by_rows, streams_of(by_rows).embedding
    monkeypatch.setattr(rows, "_memory", memoryview(bytearray(2 * TOKENS * vocabulary.BLOCK_BYTES)))
    monkeypatch.setattr(vocabulary, "ROWS_BYTES", rows.rows_bytes(TOKENS))  # one prompt's
    alone = Admission(model, MUCH, TOKENS).estimate(TOKENS, 4)
    limit = asked.Asked(alone.held + 2 * alone.working, False)
    call = {"input_ids": ids(TOKENS), "max_new_tokens": 4}
    with limit.call(model, dict(call)):
        with pytest.raises(RequestTooLarge), limit.call(model, dict(call) | {"prefill_chunk_size": TOKENS}):
            pass
        limit.memory += rows.rows_bytes(TOKENS)
        with limit.call(model, dict(call)):
            pass
    with limit.call(model, dict(call)):
        pass


def test_rows_are_counted_though_who_came_first_ends_first(by_rows, monkeypatch):
    """A call that began beside one which may look up all rows adds none to them, and has them still when that
    one has ended.
    """
    model, rows = by_rows, streams_of(by_rows).embedding
    monkeypatch.setattr(rows, "_memory", memoryview(bytearray(TOKENS * vocabulary.BLOCK_BYTES)))
    alone = Admission(model, MUCH, TOKENS).estimate(TOKENS, 4)
    call = {"input_ids": ids(TOKENS), "max_new_tokens": 4}
    without = alone.working - rows.rows_bytes(TOKENS)
    limit = asked.Asked(alone.held + rows.rows_bytes(TOKENS) + 2 * without, False)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(limit.call(model, dict(call)))
        second.enter_context(limit.call(model, dict(call)))
        first.close()
        limit.memory -= 1
        with pytest.raises(RequestTooLarge), limit.call(model, dict(call) | {"prefill_chunk_size": TOKENS}):
            pass
        limit.memory += 1
        with limit.call(model, dict(call)):
            pass


# ---------------------------------------------------------------- what is free


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_has_no_more_than_those_it_lies_in(tmp_path, monkeypatch, version):
    """A service's own group has no limit, its slice has one: it was not seen."""
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    root, most, used = {
        1: (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: (tmp_path, "memory.max", "memory.current"),
    }[version]
    home = root / "kv.slice" / "kv.service"
    home.mkdir(parents=True)
    for place, limit, held in ((home, "max", 100), (home.parent, "1000", 300)):
        (place / most).write_text(limit)
        (place / used).write_text(str(held))
        (place / "memory.stat").write_text("inactive_file 50\n")
    groups = "0::/kv.slice/kv.service\n" if version == 2 else "4:memory:/kv.slice/kv.service\n"
    assert [room for room in limits._left_of(groups + "1:cpu:/\n") if room is not None] == [750]
    (home / most).write_text("400")
    assert sorted(room for room in limits._left_of(groups) if room is not None) == [350, 750]
    (root / most).write_text("500")
    (root / used).write_text("400")
    (root / "memory.stat").write_text("inactive_file 0\n")
    elsewhere = groups.replace("kv.slice", "of-the-host")  # a container sees its own group at the root
    assert limits._left_of(elsewhere) == [100]
