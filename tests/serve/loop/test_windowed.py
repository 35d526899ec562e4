"""Proves chats in bounded memory: what is held is bounded, what is not dropped counts, states move.

Method: real servers on a tiny model of 512 positions beside one daemon, chats longer than that, answers
against those without a window while nothing of them is older than `recent`; and the loop itself, with
windowed requests beside others.
"""

import json
import queue

import pytest

import kvclient
import kvclient.hf
from kvclient.errors import Closed
from kvclient.hf.engine import saved_state
from kvclient.hf.engine.window import Window
from kvclient.serve.engine.job import Done, Failed, Job, Token
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.engine.windowed import WindowedCache, Windowing
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import LIMITS, WIDE_HEADS, Letters, alone, ask, ended

SMALL = {"recent": 64, "older": 64, "codec": "int8"}
WIDE = {"recent": 160, "older": 64, "codec": "int8"}

# Beyond letters and signs: half a character, or a special token, would not come back as the same token.
LETTERS = {str(token): -100 for token in (0, 1, *range(97, 320))}


class Chat:
    """A client that sends all that was said each time, as they do."""

    def __init__(self, system="Be brief."):
        self.messages = [{"role": "system", "content": system}]

    def say(self, server, text, new=12, headers=None, **more):
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": new, "temperature": 0,
                "logit_bias": LETTERS, **more}  # fmt: skip
        status, _, said = server.post("/v1/chat/completions", body, **(headers or {}))
        assert status == 200, said
        self.messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
        return said, said["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_turn_goes_on_on_another_server_and_equals_the_chat_without_a_window(daemon, server):
    kvstored = daemon(memory="64MiB")
    first, second = (server("--dir", str(kvstored.dir)) for _ in range(2))
    windowed, plain = Chat(), Chat()
    for place, text in ((first, "one two three"), (second, "four five"), (first, "six")):
        said, cached = windowed.say(place, text, window=WIDE)
        wanted, _ = plain.say(second, text, cache={"read": False, "write": False})
        assert said["choices"] == wanted["choices"]
        held = said["kv_reuse"]["window"]
        assert held["older_tokens"] == held["dropped_tokens"] == 0
        assert (cached > 0) == (text != "one two three")
    edited = Chat()
    edited.messages = [*windowed.messages[:3]]
    _, cached = edited.say(second, "another question", window=WIDE)
    assert cached > 0, "the state of the turn before the edited message was not found"
    body = {"messages": windowed.messages[:2], "max_tokens": 4, "window": WIDE, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    lines = second.text("/v1/chat/completions", body).splitlines()
    told = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["kv_reuse"]["window"]
    assert told["tokens"] == told["head_tokens"] + told["recent_tokens"]


def test_a_chat_longer_than_the_model_goes_on_in_bounded_memory(tiny):
    talk, helds = Chat("You are a patient bird watcher."), []
    for turn in range(9):
        said, cached = talk.say(tiny, f"{turn}: " + "what do you see? " * 4, window=SMALL)
        helds.append(said["kv_reuse"]["window"])
        assert (cached > 0) == (turn > 0)
    last = helds[-1]
    assert last["tokens"] > 512 and last["dropped_tokens"] > 0 and last["saved_bytes"] > 0
    assert last["head_tokens"] >= len("You are a patient bird watcher.")
    assert max(h["older_tokens"] for h in helds) <= 64 and max(h["recent_tokens"] for h in helds) < 64 + 32
    assert max(h["bytes"] for h in helds) < last["tokens"] * last["full_bytes"] / (
        last["head_tokens"] + last["older_tokens"] + last["recent_tokens"]
    )


def test_keys_do_not_share_windows(server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    tiny = server("--store", "64MiB", "--api-key-file", str(keys))
    alice, bob = Chat(), Chat()
    key = {"Authorization": "Bearer alice"}
    alice.say(tiny, "a secret", headers=key, window=SMALL)
    bob.messages = list(alice.messages)
    assert bob.say(tiny, "go on", headers={"Authorization": "Bearer bob"}, window=SMALL)[1] == 0
    assert alice.say(tiny, "go on", headers=key, window=SMALL)[1] > 0


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"window": {"older": 33}}, "older"),
        ({"window": {"recent": 4}}, "recent"),
        ({"window": {"codec": "int2"}}, "codec"),
        ({"window": {"name": "x"}}, "window.name"),
        ({"window": {"recent": 4096}}, "512"),
        ({"window": SMALL, "n": 2}, "n is not supported"),
    ],
)
def test_a_window_that_cannot_be_had_is_refused(tiny, more, word):
    body = {"messages": [{"role": "user", "content": "x"}], **more}
    status, _, said = tiny.post("/v1/chat/completions", body)
    assert status == 400 and word in json.dumps(said)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_beside_a_windowed_one_say_what_they_say_alone(name):
    model, events = build(name, layers=2, **WIDE_HEADS.get(name, {})), queue.Queue()
    windowing = Windowing(Window(64, 64), head_tokens=8)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        loop = Loop(model, kv, LIMITS)
        prompts = [prompt(40 + 50 * index, seed=index) for index in range(4)]
        wanted = alone(model, kv, prompts)
        jobs = [ask(loop, ids, events, i, windowing=windowing if i == 1 else None)
                for i, ids in enumerate(prompts)]  # fmt: skip
        ends = ended(events, 4)
        loop.close()
    for index in (0, 2, 3):
        assert isinstance(ends[index], Done) and jobs[index].tokens == wanted[index]
    if name == "gemma2":  # its layers have windows of their own
        assert isinstance(ends[1], Failed) and ends[1].status == 400
    else:
        assert len(jobs[1].tokens) == len(wanted[1]) and ends[1].window["head_tokens"] == 8


def test_a_windowed_answer_that_ends_in_a_step_which_fails_for_others_has_ended():
    model, events = build("llama", layers=2), queue.Queue()
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        loop = Loop(model, kv, LIMITS)
        plain, failed = loop._passes.step, []

        def step(*args):
            if windowed and windowed[0].entry is None and not failed:
                failed.append(True)
                raise MemoryError("no room for a step of several")
            return plain(*args)

        windowed, loop._passes.step = [], step
        long = Job(prompt(20)[0].tolist(), 200, Sampler(Sampling(temperature=0), []), Text(Letters()),
                   lambda event: events.put((0, event)))  # fmt: skip
        loop.submit(long)
        while not isinstance(events.get(timeout=60)[1], Token):
            pass
        windowed.append(ask(loop, prompt(30, seed=3), events, 1, windowing=Windowing(Window(64, 64))))
        ends = ended(events, 2)
        loop.close()
    assert failed and isinstance(ends[0], Done) and isinstance(ends[1], Done)
    assert loop.counts["requests_failed_total"] == 0 and events.empty()


def test_a_state_that_is_lost_while_it_is_read_leaves_nothing_behind(monkeypatch):
    model, ids = build("llama", layers=2), prompt(40)[0].tolist()
    windowing, unpack, left = Windowing(Window(64, 64), turn_ends=30), saved_state._unpack, [1]

    def breaks(*args):
        if not left:
            raise Closed("the block is gone")
        left.pop()
        unpack(*args)

    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        first, broken, plain, found = (WindowedCache(model, kv, windowing) for _ in range(4))
        first.feed(ids[:30])
        assert first.save(ids[:30]) and found.resume(ids) == 30
        with monkeypatch.context() as patched:
            patched.setattr(saved_state, "_unpack", breaks)
            assert broken.resume(ids) == 0 and not left
        assert broken.feed(ids).equal(plain.feed(ids)) and broken.told() == plain.told()
