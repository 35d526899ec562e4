"""Proves that a model whose layers are streamed to a GPU is asked whether a request fits as one on the CPU
is, that `auto` leaves room for one, and what a trace has of the device.

Method: packed checkpoints of a tiny model, on a GPU and here: on the emulated kernels and a device that
copies late (tests/hf/streaming/device); limits made of the planner's own estimates; readings of the device as
the test says.
"""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from kvclient.hf.streaming import Admission, RequestTooLarge, streaming_stats, write_trace
from kvclient.hf.streaming.device.runtime import Reading
from kvclient.hf.streaming.planner import asked
from kvclient.hf.streaming.planner.shape import Shape
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import WORKING_BYTES
from tests.gpu.models import test_host_compute as host
from tests.gpu.models.test_streamed import LAYERS, PROMPT, logits, opened, runtime, small  # noqa: F401
from tests.hf.awq_checkpoint import write_checkpoint

OPTIONS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("packed"), small().float(), 64)


def ids(tokens, device):
    return (torch.arange(tokens, device=device) % 300)[None]


def limit(model, tokens):
    """Memory for a prompt of so many, computed at one time, and three new ones."""
    return Admission(model, 1 << 40, tokens).estimate(tokens, 3).bytes


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_computed(home, runtime, device, monkeypatch):  # noqa: F811
    monkeypatch.setattr(asked, "WORKING_BYTES", 0)
    first = opened(home)
    memory = limit(first, 40)
    streams_of(first).close()
    model = opened(home, memory=memory)
    wanted = type(model).generate(model, ids(40, device), **OPTIONS)
    assert torch.equal(model.generate(ids(40, device), **OPTIONS), wanted)
    loads = streaming_stats(model)["loads"]
    with pytest.raises(RequestTooLarge, match="the longest prompt that fits has 40"):
        model.generate(ids(41, device), **OPTIONS)
    found = streaming_stats(model)
    assert found["loads"] == loads
    assert found["requests"] == {
        "asked": 2, "in_pieces": 0, "truncated": 0, "refused": 1, "raised": found["requests"]["raised"]
    }  # fmt: skip
    streams_of(model).close()
    model = opened(home, memory=memory, auto_truncate=True)
    said = model.generate(ids(60, device), **OPTIONS)
    assert said.shape[1] < 63 and torch.equal(said[0, 0], ids(60, device)[0, 60 + 3 - said.shape[1]])
    streams_of(model).close()


def test_many_rows_are_multiplied_by_a_matrix_of_numbers_which_is_counted(home, runtime, device):  # noqa: F811
    model = opened(home)
    said = Admission(model, 1 << 40).estimate(40, 3)
    streams = streams_of(model)
    assert streams.unpacked == 128 * 192 * 2  # the widest packed matrix, in fp16
    streams.unpacked = 0
    assert said.bytes == Admission(model, 1 << 40).estimate(40, 3).bytes + 128 * 192 * 2
    streams.close()


def test_auto_leaves_room_for_a_request(home, runtime, device, monkeypatch):  # noqa: F811
    """It left 256 MiB, whatever keys and values a request of this model has."""
    whole = opened(home, "full_resident")
    shape, held = Shape.of(whole, True, True), streams_of(whole).plan.bytes
    tokens = next(n for n in range(384, 1 << 20, 8) if shape.call(n, 128) > WORKING_BYTES + 50_000)
    memory = held + WORKING_BYTES + streams_of(whole).unpacked
    more = shape.call(tokens, 128) - WORKING_BYTES
    cases = (384, memory, False), (tokens, memory, True), (tokens, memory + more, False)
    for room, enough, streamed in cases:
        model = opened(home, "auto", memory=enough, room_tokens=room)
        assert any(streams_of(model).plan.streamed) is streamed
        assert streamed or Admission(model, enough, 128).fits(room - 10, 10)
        streams_of(model).close()


def test_what_the_device_was_measured_to_take_raises_what_is_said(home, runtime, device, monkeypatch):  # noqa: F811
    model = opened(home, memory=1 << 34)
    readings = iter([Reading(100, 200), Reading(100, 200)])  # no new peak: nothing is known
    monkeypatch.setattr(runtime, "reading", lambda: next(readings), raising=False)
    model.generate(ids(40, device), **OPTIONS)
    assert streaming_stats(model)["requests"]["raised"] == 1.0
    working = Admission(model, 1 << 34, 40).estimate(40, 3).working
    readings = iter([Reading(100, 200), Reading(100, 100 + working * 3 // 2)])
    model.generate(ids(40, device), **OPTIONS)
    assert streaming_stats(model)["requests"]["raised"] == pytest.approx(1.5)
    readings = iter([Reading(100, 200), Reading(100, 100 + working * 100)])  # somebody else's, maybe
    model.generate(ids(40, device), **OPTIONS)
    assert streaming_stats(model)["requests"]["raised"] == asked.MOST_RAISED
    streams_of(model).close()


def test_slots_stay_where_they_are(home, runtime, device):  # noqa: F811
    model, seen = opened(home), {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda layer, *_, number=number: seen.setdefault(number, set()).add(
                layer.input_layernorm.weight.data_ptr()
            ),
            prepend=True,
        )
    slots = [slot.memory.data_ptr() for slot in streams_of(model).scheduler.slots]
    for _ in range(5):
        logits(model, device)
    assert [slot.memory.data_ptr() for slot in streams_of(model).scheduler.slots] == slots
    assert len(seen) == LAYERS and all(len(places) <= len(slots) for places in seen.values())
    assert len(set.union(*seen.values())) == len(slots)
    streams_of(model).close()


def test_a_trace_has_what_the_device_did(home, runtime, device, tmp_path):  # noqa: F811
    model = opened(home, trace=True)
    for _ in range(3):
        logits(model, device, PROMPT)
    write_trace(model, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lines = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(lines[event["tid"]], event) for event in events if event["ph"] == "X"]
    computed = [event for line, event in spans if line.startswith("compute")]
    assert len(computed) == 3 * 4 * LAYERS  # a prompt, and three tokens
    assert {line.partition(",")[0] for line, _ in spans} >= {"copy", "wait", "compute"}
    whole = sum(streaming_stats(model)["computed_s"].values())
    assert sum(event["dur"] for event in computed) == pytest.approx(whole * 1e6, rel=1e-3)
    streams_of(model).close()


def test_a_trace_has_what_the_host_computes(runtime, device, tmp_path, monkeypatch, tmp_path_factory):  # noqa: F811
    home = write_checkpoint(tmp_path_factory.mktemp("shared"), small().float(), 64)
    held = host.Home(home, torch.float16, 64)
    link = host.Shares(1.0, {host.MOST_ROWS: 0.1}, {host.MOST_ROWS: host.ALL}, layers=LAYERS)
    monkeypatch.setattr(host.placing, "_measured", lambda *_: link)
    model = host.opened(held, trace=True)
    before = streaming_stats(model)["placement"]["computed_on_host"]
    logits(model, device)
    write_trace(model, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    count = sum(event.get("ph") == "X" for event in json.loads(text)["traceEvents"])
    after = streaming_stats(model)["placement"]["computed_on_host"]
    assert "host computes" in text and count >= after - before > 0
    streams_of(model).close()
