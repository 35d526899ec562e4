"""Goal: what --trace writes is a file of Chrome's trace event format, of which Perfetto shows every span.

Method: a validator of what that format asks of the two kinds of events we write (X and M), and of what
Perfetto's importer drops without a word: spans of one line that overlap and are not one within the other. It
is run on spans of many threads, on a streamed model that two threads ask at one time, and on broken files.
Perfetto itself is not run here.
"""

import json
import math
import random
import threading

import pytest
import torch

from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, write_trace
from kvclient.hf.streaming.trace import Trace


def whole(number):
    return isinstance(number, int) and not isinstance(number, bool) and 0 < number < 1 << 31


def nanoseconds(event, name):
    """Of a time in microseconds; Perfetto counts in whole nanoseconds."""
    value = event[name]
    assert isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value), event
    found = round(value * 1000)
    assert value >= 0 and abs(value * 1000 - found) < 1e-3, f"{event}: {name} is no whole nanosecond"
    return found


def check(text):
    """Raises AssertionError for a text that is no such file. Its spans by line: (start, end, name)."""
    whole_file = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(whole_file) == {"traceEvents", "displayTimeUnit"}
    assert whole_file["displayTimeUnit"] in ("ms", "ns")
    lines, spans, named = {}, {}, set()
    for event in whole_file["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"], event
        assert whole(event["pid"]) and whole(event["tid"]), event
        line = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert set(event) == {"name", "ph", "pid", "tid", "args"} and event["name"] == "thread_name"
            assert line not in lines and isinstance(event["args"]["name"], str)
            assert event["args"]["name"] not in named, "two lines of one name"
            lines[line] = event["args"]["name"]
            named.add(lines[line])
            continue
        assert event["ph"] == "X" and isinstance(event["cat"], str), event
        assert set(event) == {"name", "ph", "pid", "tid", "cat", "ts", "dur"}
        start, length = nanoseconds(event, "ts"), nanoseconds(event, "dur")
        spans.setdefault(line, []).append((start, start + length, event["name"]))
    assert set(spans) == set(lines), "a line without a name, or a name without a line"
    for line, found in spans.items():
        assert found == sorted(found, key=lambda span: (span[0], -span[1])), "spans are not in order"
        within = []  # ends of the spans that are open
        for start, end, name in found:
            while within and within[-1] <= start:
                within.pop()
            assert not within or end <= within[-1], f"{name} of {lines[line]} overlaps one and is not in it"
            within.append(end)
    return {lines[line]: found for line, found in spans.items()}


def written(trace, tmp_path):
    trace.write(tmp_path / "trace.json")
    return (tmp_path / "trace.json").read_text()


def test_spans_of_many_threads(tmp_path):
    """Two that compute at one time do not lie on one line, where one of them would not be shown."""
    chance, trace, handed = random.Random(5), Trace(), []
    for _ in range(500):
        start = trace._began + chance.uniform(0, 10)
        handed.append((chance.choice(("compute", "wait", "read 0")), start, start + chance.expovariate(3)))
        trace.span(handed[-1][0], 7, *handed[-1][1:])
    found = check(written(trace, tmp_path))
    assert sum(map(len, found.values())) == len(handed)
    for track in ("compute", "wait", "read 0"):
        assert found[track] and all(name.split(", ")[0] in ("compute", "wait", "read 0") for name in found)


def test_spans_behind_one_another_share_a_line(tmp_path):
    """Whatever the clock's fractions of a nanosecond are."""
    trace, at = Trace(), 0.0
    for number in range(300):
        length = 1e-3 / 3 + number * 1.1e-7
        trace.span("compute", number, trace._began + at, trace._began + at + length)
        at += length
    assert [len(spans) for spans in check(written(trace, tmp_path)).values()] == [300]


def test_a_trace_of_nothing(tmp_path):
    assert check(written(Trace(), tmp_path)) == {}


def test_a_streamed_model_that_two_threads_ask(checkpoint, tmp_path):
    config = StreamingConfig(residency="full_stream", n_staging_slots=2, trace=True)
    model = StreamingCausalLM.from_pretrained(checkpoint, config)
    ids = torch.arange(1, 25)[None]

    def ask():
        for _ in range(20):
            model(ids)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    write_trace(model, tmp_path / "trace.json")
    found = check((tmp_path / "trace.json").read_text())
    computed = [span for line, spans in found.items() if line.startswith("compute") for span in spans]
    assert len(computed) == 2 * 20 * model.config.num_hidden_layers
    assert any(line.startswith("wait") for line in found) and "read 0" in found


EVENT = {"name": "layer 1", "ph": "X", "pid": 1, "tid": 1, "cat": "streaming", "ts": 10.0, "dur": 5.0}
NAME = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "compute"}}


@pytest.mark.parametrize(
    "events",
    [
        [EVENT],
        [NAME, NAME, EVENT],
        [NAME, EVENT | {"ts": 12.0}, EVENT],
        [NAME, EVENT, EVENT | {"ts": 12.0}],
        [NAME, EVENT | {"dur": -1.0}],
        [NAME, EVENT | {"ts": math.nan}],
        [NAME, EVENT | {"ts": 10.0001}],
        [NAME, EVENT | {"ph": "B"}],
        [NAME, EVENT | {"tid": 0}],
        [NAME, EVENT | {"pid": "1"}],
    ],
    ids=["no name", "two names", "order", "overlap", "negative", "NaN", "fraction", "phase", "tid", "pid"],
)
def test_the_validator_refuses(events):
    check(json.dumps({"traceEvents": [NAME, EVENT], "displayTimeUnit": "ms"}))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
