"""Goal: a conversation in bounded memory says what plain generation says for as long as it holds everything,
stays near it while older tokens are quantised, holds no more than its window, and goes on in another process.

Method: tiny random models; plain forward passes over all tokens as reference; a real daemon and a second
process for the take-over, the in-memory fake for the rest. Turns that fail: test_turns.py.
"""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvclient
from kvclient.blocks.codec import Kivi
from kvclient.errors import InvalidArgument
from kvclient.hf import Engine, Window
from kvclient.hf.decoding import stopping
from kvclient.hf.engine import saved_state
from kvclient.hf.engine.saved_state import SavedState
from kvclient.hf.engine.window import WindowCache
from kvclient.hf.model.structure import Refused
from kvclient.kernels import NotQuantisable
from tests.hf.zoo import REFUSED, SERVED, build, generate, prompt
from tests.warm_python import run as run_warm

ROOT = Path(__file__).resolve().parents[3]
SMALL = Window(recent=32, older=64)
HEAD = 32  # numbers of a head: those of eight go other ways than those of real models
ALL = Window(recent=4096, older=0)


class Words:
    """A tokenizer of numbers."""

    pad_token_id, eos_token_id = 0, None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, tokens))


def ids(length, seed=1):
    return prompt(length, seed)[0].tolist()


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=2, head_dim=HEAD)


@pytest.fixture
def engine(model, client):
    with Engine(model, Words(), client, block_tokens=32, repair=None, self_test=False) as engine:
        yield engine


@pytest.mark.parametrize("name", sorted(SERVED))
def test_with_everything_held_it_says_what_plain_generation_says(name, client):
    model = build(name, layers=2)
    if model is None:
        pytest.skip(f"this transformers has no {name}")
    with Engine(model, Words(), client, repair=None, self_test=False) as engine:
        talk = engine.conversation("all", system=ids(20), window=ALL)
        said = ids(20)
        for turn in range(3):
            words = ids(15 + turn, seed=10 + turn)
            with engine.kv.bypass():
                wanted, *_ = generate(model, torch.tensor([said + words]), 7)
            answer = talk.say(words, 7)
            assert answer.tokens == wanted[0, len(said) + len(words) :].tolist()
            said = wanted[0].tolist()
        held = talk.held
        assert held.tokens == len(said) - 1 and held.dropped_tokens == held.older_tokens == 0
        assert held.bytes == held.full_bytes and held.saved_bytes == 0


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bloom", "glm4"])
def test_older_tokens_quantised_stay_near_during_generation(name):
    model, tokens = build(name, layers=2), ids(150)
    cache = WindowCache(model, Window(recent=32, older=128))
    far = []
    with torch.no_grad():
        plain = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for position, token in enumerate(tokens):
        ours = cache.feed([token]).log_softmax(-1)
        far.append(float((plain[position].exp() * (plain[position] - ours)).sum()))
    assert cache.held.dropped_tokens == 0 and cache.held.older_tokens == 96
    assert max(far[:64]) < 1e-6  # nothing was quantised yet
    assert 1e-9 < sum(far[100:]) / 50 < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_and_told_as_it_is(dtype, client):
    model = build("llama", dtype=dtype, layers=2, head_dim=HEAD)
    with Engine(model, Words(), client, repair=None, self_test=False) as engine:
        talk = engine.conversation("long", system=ids(10), window=SMALL)
        live, group = [], SMALL.codec.group
        for turn in range(8):
            talk.say(ids(23, seed=turn), 25, on_token=lambda *_: live.append(talk.held))
        assert talk.held.tokens == 10 + 8 * 48 - 1
        assert talk.held.dropped_tokens > 200
        per_token = 2 * 2 * HEAD * dtype.itemsize * 2
        for held in live:
            kept = held.head_tokens + held.older_tokens + held.recent_tokens
            assert kept + held.dropped_tokens == held.tokens
            assert held.older_tokens <= SMALL.older and held.recent_tokens < SMALL.recent + group
            assert held.head_tokens == 10 and held.head_bytes == 10 * per_token
            assert held.recent_bytes == held.recent_tokens * per_token
            assert held.older_bytes == held.older_tokens * 2 * SMALL.codec.bytes_per_token(2, HEAD)
            assert held.full_bytes == kept * per_token
            assert held.saved_bytes == held.full_bytes - held.bytes
        most = 10 + SMALL.older + 2 * SMALL.recent + group  # a fed stretch is computed before it is settled
        assert max(held.working_bytes for held in live) <= most * per_token / 2
        for layer in talk._cache.layers:  # no view keeps more memory alive than is told
            for part in (layer.head, layer.recent):
                assert part.untyped_storage().nbytes() == part.nbytes
            assert layer.keys is None and layer.values is None
        assert live[-1].saved_bytes > 0


def test_what_is_kept_is_what_was_computed(model):
    """The head and the recent tokens bit by bit at their positions, older ones as the codec has them."""
    tokens = ids(200)
    cache = WindowCache(model, SMALL)
    cache.head_tokens = 12
    with torch.no_grad():
        plain = model(torch.tensor([tokens]), use_cache=True).past_key_values.layers[0]
    for start in range(0, 200, 20):
        cache.feed(tokens[start : start + 20])
    layer, held = cache.layers[0], cache.held
    # In the first layer K and V depend on nothing but the token and its position.
    torch.testing.assert_close(layer.head[0], plain.keys[0, :, :12])
    torch.testing.assert_close(layer.recent[1], plain.values[0, :, -held.recent_tokens :])
    first = 12 + held.dropped_tokens
    for index, group in enumerate(layer.older):
        columns = slice(first + 32 * index, first + 32 * (index + 1))
        computed = plain.keys[0, :, columns]
        far = (layer._dequantised(group)[0] - computed).norm() / computed.norm()
        assert 0 < far < 0.01
    assert first + held.older_tokens + held.recent_tokens == 200


def test_a_second_object_goes_on_bit_by_bit_and_the_first_catches_up(engine):
    alone, talk = engine.conversation("alone", ids(9), SMALL), engine.conversation("both", ids(9), SMALL)
    for turn in range(6):
        other = engine.conversation("both", window=SMALL)
        assert other.turn == turn
        words = ids(21, seed=turn)
        wanted = alone.say(words, 9)
        answer = (talk if turn in (0, 3, 4) else other).say(words, 9)
        assert answer.tokens == wanted.tokens and answer.saved
        held = dataclasses.replace(answer.held, working_bytes=wanted.held.working_bytes)  # of each process
        assert held == wanted.held
        assert answer.taken_over == (turn in (1, 2, 3, 5))  # not where the same object had left off
    assert engine.conversation("both", window=ALL).turn == 0  # another window, another conversation
    talk.forget()
    assert talk.turn == engine.conversation("both", window=SMALL).turn == 0


SECOND = """
import sys
import torch
import kvclient
from kvclient.hf import Engine, Window
from tests.hf.engine.test_window import SMALL, Words, ids
from tests.hf.zoo import build
with kvclient.connect(sys.argv[1]) as client:
    model = build("llama", layers=2, head_dim=32)
    with Engine(model, Words(), client, repair=None, self_test=False) as engine:
        talk = engine.conversation("moved", window=SMALL)
        said = talk.say(ids(30, seed=2), 20)
        assert said.taken_over
        print(talk.turn - 1, *said.tokens)
"""


def test_another_process_takes_the_conversation_over(daemon, model):
    server = daemon(memory="64MiB")
    with (
        server.connect() as client,
        Engine(model, Words(), client, repair=None, self_test=False) as engine,
    ):
        both = [engine.conversation(name, ids(9), SMALL) for name in ("moved", "stays")]
        for talk in both:
            assert talk.say(ids(150), 20).saved
        done = run_warm([sys.executable, "-c", SECOND, str(server.dir)], cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        turn, *tokens = map(int, done.stdout.split())
        assert turn == 1 and tokens == both[1].say(ids(30, seed=2), 20).tokens
        answers = [talk.say(ids(8, seed=3), 5) for talk in both]
        assert answers[0].tokens == answers[1].tokens and answers[0].taken_over


def test_two_that_save_the_same_turn_both_go_on(engine, client, monkeypatch):
    """The last to end stays; what another is still writing is waited for, and not for ever."""
    talk, other = (engine.conversation("same", window=SMALL) for _ in range(2))
    create = client.create

    def after_the_other(*args, **kwargs):
        monkeypatch.setattr(client, "create", create)
        assert other.say(ids(30, seed=2), 5).saved
        return create(*args, **kwargs)

    monkeypatch.setattr(client, "create", after_the_other)
    assert talk.say(ids(40), 5).saved and talk.turn == other.turn == 1
    third = engine.conversation("same", window=SMALL)
    assert third._cache.tokens == talk._cache.tokens == 44

    def never_done(keys, *args, **kwargs):
        writers.append(create(keys, *args, **kwargs))
        return create(keys, *args, **kwargs)

    writers = []
    monkeypatch.setattr(client, "create", never_done)
    monkeypatch.setattr(saved_state, "WAIT_S", 0.01)
    assert not talk.say(ids(20, seed=3), 5).saved and talk.turn == 2
    for writer in writers:
        writer.abort()
    monkeypatch.setattr(client, "create", create)
    wanted = engine.conversation("alone", window=SMALL)
    for words in (ids(40), ids(20, seed=3)):
        wanted.say(words, 5)
    said = talk.say(ids(9, seed=4), 5)
    assert said.saved and said.tokens == wanted.say(ids(9, seed=4), 5).tokens


def test_what_the_codec_cannot_hold_stays_in_full_and_is_told(engine, monkeypatch):
    def beyond(*_args):
        raise NotQuantisable("beyond 65504")

    monkeypatch.setattr(Kivi, "encode", beyond)
    talk = engine.conversation("wide", window=SMALL)
    answer = talk.say(ids(150), 5)
    assert answer.held.not_quantisable == 2 * 2 and answer.held.saved_bytes == 0 and answer.saved
    other = engine.conversation("wide", window=SMALL)
    assert other.held.not_quantisable == 4
    for ours, theirs in zip(talk._cache.layers, other._cache.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.older, theirs.older, strict=True))


def test_states_do_not_pile_up(engine, client):
    talk = engine.conversation("many", window=SMALL)
    for turn in range(6):
        talk.say(ids(5, seed=turn), 2)
    stats = client.stats()
    assert (stats["blocks"], stats["pins"], stats["created"]) == (2, 0, 0)
    assert SavedState(client, lambda: engine.kv.identity, "many", SMALL, 50).newest() == 6


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_models_are_refused_with_the_reason(name):
    model = build(name, layers=3)
    if model is None:
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(Refused, match=REFUSED[name][3]):
        WindowCache(model, SMALL)


def test_the_end_of_the_positions_and_wrong_arguments_are_named(engine):
    talk = engine.conversation("end", window=SMALL)
    talk.say(ids(400), 3)
    wide = engine.conversation("wide", window=Window(recent=300, older=320))
    wide.say(ids(400), 3)
    with pytest.raises(InvalidArgument, match="512 positions"):
        wide.say(ids(100), 20)  # more would be held than the model has positions
    assert wide.turn == 1 and wide.say(ids(10), 3).saved
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0},
                  {"repetition_penalty": 0.0}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            talk.say(ids(3), **wrong)
    with pytest.raises(InvalidArgument, match="without tokens"):
        talk.say("")
    for wrong in ({"recent": 0}, {"older": -32}, {"older": 33}, {"sink_tokens": -1}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            Window(**wrong)


def test_a_conversation_outgrows_the_models_positions(engine, model):
    """What is held is that of a text in which the head stands right before the rest."""
    talk = engine.conversation("long", window=Window(recent=32, older=0))
    said = []
    for turn in range(8):
        said += ids(100, seed=turn)
        assert talk.say(said[-100:], 2).saved
    held = talk.held
    assert held.tokens > 512 > held.head_tokens + held.recent_tokens and held.dropped_tokens > 400
    layer, cache = talk._cache.layers[0], DynamicCache(config=model.config)
    kept = 4 + held.recent_tokens
    position = torch.arange(held.dropped_tokens, held.dropped_tokens + 4)
    with torch.no_grad():
        first = torch.tensor([said[:4]])
        model(input_ids=first, position_ids=position[None], past_key_values=cache, use_cache=True)
    assert layer.get_seq_length() == kept
    talk._cache._turn_head()
    torch.testing.assert_close(layer._placed_head()[0], cache.layers[0].keys[0], atol=1e-4, rtol=1e-3)


def test_a_model_with_learned_positions_ends_with_them(client):
    with Engine(build("gpt2", layers=2), Words(), client, repair=None, self_test=False) as engine:
        talk = engine.conversation("end", window=Window(recent=32, older=0))
        limit = engine.model.config.max_position_embeddings
        talk.say(ids(limit - 50), 3)
        with pytest.raises(InvalidArgument, match=f"{limit} positions"):
            talk.say(ids(100), 20)


def test_a_namespace_that_says_its_salt_late_parts_conversations(model, client):
    """One opened before the daemon was there belongs to the namespace that it then met."""
    client.salt = None
    with Engine(model, Words(), client, block_tokens=32, repair=None, self_test=False) as engine:
        talk = engine.conversation("late", window=SMALL)
        client.salt = bytes(31) + b"1"
        assert talk.say(ids(10), 2).saved
        assert engine.conversation("late", window=SMALL).turn == 1
        client.salt = bytes(31) + b"2"
        assert engine.conversation("late", window=SMALL).turn == 0


def test_sampling_stop_strings_and_soft_stops(engine, monkeypatch):
    talk = engine.conversation("sampled", window=SMALL)
    torch.manual_seed(1)
    sampled = talk.say(ids(20), 12, temperature=1.5, top_k=50, top_p=0.95).tokens
    greedy = engine.conversation("greedy", window=SMALL).say(ids(20), 12)
    single = engine.conversation("one", window=SMALL).say(ids(20), 12, temperature=1.5, top_k=1).tokens
    assert single == greedy.tokens != sampled
    penalised = engine.conversation("new words", window=SMALL).say(ids(20), 12, repetition_penalty=1e9).tokens
    assert len(set(penalised)) == 12 and not set(penalised) & set(ids(20)), "nothing is said twice"
    stop = greedy.text[9:13]
    stopped = engine.conversation("stop", window=SMALL).say(ids(20), 12, stop=stop)
    assert stopped.finish == "stop" and stopped.text == greedy.text[: greedy.text.find(stop)]
    monkeypatch.setattr(stopping, "SENTENCE", re.compile("$"))
    soft = engine.conversation("soft", window=SMALL).say(ids(20), 12, soft_stop=0.5)
    assert (soft.finish, soft.tokens) == ("sentence", greedy.tokens[:6])


def test_without_a_daemon_it_goes_on_and_says_that_nothing_is_saved(engine, tmp_path):
    wanted, alike = engine.conversation("alone", window=SMALL), build("llama", layers=2, head_dim=HEAD)
    with (
        kvclient.connect(dir=tmp_path, on_error="miss") as client,
        Engine(alike, Words(), client, repair=None, self_test=False) as other,
    ):
        talk = other.conversation("alone", window=SMALL)
        for turn in range(3):
            answer = talk.say(ids(30, seed=turn), 10)
            assert answer.tokens == wanted.say(ids(30, seed=turn), 10).tokens and not answer.saved
