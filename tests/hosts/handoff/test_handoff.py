"""A prompt computed on one host and continued on another, with a stock generate() on both.

Tiny random models, two daemons; the prefiller stops where a test says, on a condition.
"""

import contextlib
import dataclasses
import threading

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import Handoff
from kvclient.hf.connector.load import PrefixSource
from kvclient.hf.connector.save import Publisher
from tests.hf.zoo import build, generate, prompt
from tests.hosts.hosts import Hosts
from tests.hosts.test_push import takes_pushes

BLOCK, WAIT_S, LAYERS = 16, 60.0, 3


class Died(Exception):
    """Of a prefill, half-way."""


@pytest.fixture
def pair(daemon, tmp_path, wait_until):
    """(prefilling, decoding) attachments, each of a model of its own, on a host of its own."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    with hosts[0].connect() as here, hosts[1].connect() as there:
        made = [
            kvclient.hf.attach(build("llama"), client, block_tokens=BLOCK, self_test=False)
            for client in (here, there)
        ]
        made[0].hosts = made[1].hosts = hosts
        yield made
        for kv in made:
            kv.detach()


def resumed(kv, handoff, new_tokens=8):
    out = kv.resume(
        Handoff.from_json(handoff.to_json()), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def test_what_one_host_prefilled_the_other_decodes_and_answers_the_same(pair):
    ids = prompt(100)
    tokens, logits, _ = generate(build("llama"), ids)
    handoff = pair[0].handoff(input_ids=ids, attention_mask=torch.ones_like(ids))
    found, found_logits = resumed(pair[1], handoff)
    assert torch.equal(found, tokens)
    assert torch.allclose(found_logits, logits, atol=1e-5)
    assert pair[1].last.reused_tokens >= 96
    assert handoff.wait(WAIT_S) and handoff.held
    assert pair[1].hosts.peers(1)["n0"]["fetched"] >= 6
    found, _ = resumed(pair[1], handoff)  # a second time
    assert torch.equal(found, tokens)
    assert pair[1].last.reused_tokens == 99, "what is left behind the last whole block is a block too"


@pytest.fixture
def last_layer(monkeypatch):
    """(reached, opened): the prefill stops before it writes its last layer, until `opened`."""
    reached, opened, original = threading.Event(), threading.Event(), Publisher.written

    def written(self, layer, *more):
        if threading.current_thread().name == "kvclient-handoff" and layer == LAYERS - 1:
            reached.set()
            assert opened.wait(WAIT_S)
        original(self, layer, *more)

    monkeypatch.setattr(Publisher, "written", written)
    yield reached, opened
    opened.set()


def test_decode_begins_while_the_prefill_still_computes(pair, last_layer, monkeypatch):
    """The last layer is written only after the other host has taken the first."""
    ids, (_, opened), original = prompt(100), last_layer, PrefixSource._loaded

    def loaded(self, layer):
        opened.set()
        original(self, layer)

    monkeypatch.setattr(PrefixSource, "_loaded", loaded)
    tokens, *_ = generate(build("llama"), ids)
    handoff = pair[0].handoff(input_ids=ids)
    assert not handoff.wait(0), "it returns at once"
    found, _ = resumed(pair[1], handoff)
    assert opened.is_set() and handoff.wait(WAIT_S)
    assert torch.equal(found, tokens)
    assert pair[1].last.followed_tokens == 99, "with what is left behind the last whole block"


def test_two_hosts_decode_one_prefill_at_once(daemon, tmp_path, wait_until, last_layer, monkeypatch):
    """The last layer is written only after both have taken the first."""
    (_, opened), original, took = last_layer, PrefixSource._loaded, set()
    hosts, ids, answers = Hosts(daemon, tmp_path, 3).start().wait_up(wait_until), prompt(100), {}
    tokens, *_ = generate(build("llama"), ids)

    def loaded(self, layer):
        took.add(threading.current_thread().name)
        if len(took) == 2:
            opened.set()
        original(self, layer)

    def decode(name, kv, handoff):
        answers[name] = *resumed(kv, handoff), kv.last.followed_tokens

    with contextlib.ExitStack() as ends:
        made = []
        for host in hosts.made:
            client = ends.enter_context(host.connect())
            made.append(kvclient.hf.attach(build("llama"), client, block_tokens=BLOCK, self_test=False))
            ends.callback(made[-1].detach)
        handoff = made[0].handoff(input_ids=ids)
        monkeypatch.setattr(PrefixSource, "_loaded", loaded)
        threads = [
            threading.Thread(target=decode, args=(name, kv, handoff), name=name)
            for name, kv in zip(("b", "c"), made[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handoff.wait(WAIT_S)
    assert set(answers) == {"b", "c"} and all(followed == 99 for *_, followed in answers.values())
    assert all(torch.equal(found, tokens) for found, *_ in answers.values())


def test_a_prefiller_that_dies_half_way_costs_time_and_no_token(pair, last_layer):
    ids, (reached, _) = prompt(100), last_layer
    tokens, *_ = generate(build("llama"), ids)
    handoff = pair[0].handoff(input_ids=ids)
    assert reached.wait(WAIT_S)
    pair[0].hosts[0].kill()
    found, _ = resumed(pair[1], handoff)
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("followed", [False, True])
def test_what_was_whole_when_the_prefiller_died_is_not_computed_again(pair, monkeypatch, followed):
    """It dies in the last layer of the third chunk, before or while the decoder follows its blocks."""
    ids, whole = prompt(100), 4 * BLOCK
    dies, written, waits = threading.Event(), Publisher.written, PrefixSource._wait

    def dying(self, layer, start, *more):
        if threading.current_thread().name == "kvclient-handoff" and (layer, start) == (LAYERS - 1, whole):
            assert not followed or dies.wait(WAIT_S)
            raise Died
        written(self, layer, start, *more)

    def waiting(self, found, form, layer):
        if layer == LAYERS - 1:
            dies.set()
        waits(self, found, form, layer)

    monkeypatch.setattr(Publisher, "written", dying)
    monkeypatch.setattr(PrefixSource, "_wait", waiting)
    tokens, *_ = generate(build("llama"), ids)
    handoff = pair[0].handoff(input_ids=ids, prefill_chunk_size=whole // 2)
    if not followed:
        with pytest.raises(Died):
            handoff.wait(WAIT_S)
    found, _ = resumed(pair[1], handoff)
    assert torch.equal(found, tokens)
    assert pair[1].last.reused_tokens == whole and pair[1].hosts.peers(1)["n0"]["fetched"] == whole // BLOCK
    assert pair[1].last.followed_lost == followed


def test_a_handoff_of_another_model_or_none_at_all_is_refused(pair):
    handoff = pair[0].handoff(input_ids=prompt(40))
    assert handoff.wait(WAIT_S)
    other = dataclasses.replace(handoff, identity=bytes(32))
    with pytest.raises(InvalidArgument, match="identity"):
        pair[1].resume(other)
    with pytest.raises(InvalidArgument, match="block_tokens=8"):
        pair[1].resume(dataclasses.replace(handoff, block_tokens=8))
    for text in ("", "[]", "{}", '{"version": 2}', handoff.to_json().replace("[[", "[[-1, ")):
        with pytest.raises(InvalidArgument):
            Handoff.from_json(text)
    with pytest.raises(InvalidArgument, match="lease_s"):
        pair[0].handoff(input_ids=prompt(40), lease_s=1)
    with pytest.raises(InvalidArgument, match="on the left"):
        pair[0].handoff(input_ids=prompt(8), attention_mask=torch.tensor([[1] * 7 + [0]]))
    assert Handoff.from_json(handoff.to_json()) == handoff


def test_a_handoff_that_names_its_decoder_is_there_before_it_is_resumed(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path)
    takes_pushes(hosts, 1)
    hosts.start().wait_up(wait_until)
    ids = prompt(100)
    tokens, *_ = generate(build("llama"), ids)
    with hosts[0].connect() as here, hosts[1].connect() as there:
        first = kvclient.hf.attach(build("llama"), here, block_tokens=BLOCK, self_test=False)
        second = kvclient.hf.attach(build("llama"), there, block_tokens=BLOCK, self_test=False)
        handoff = first.handoff(input_ids=ids, to="n1")
        assert handoff.pushed >= 6
        wait_until(lambda: hosts.peers(1)["n0"]["fetched"] == handoff.pushed)
        found, _ = resumed(second, handoff)
        assert torch.equal(found, tokens) and second.last.reused_tokens >= 96
        unknown = first.handoff(input_ids=prompt(40, seed=3), to="nobody")
        assert unknown.pushed == 0 and unknown.wait(WAIT_S)
        for wrong in (5, "", "n" * 64):  # before anything is computed or held
            with pytest.raises(InvalidArgument, match="a host's name has 1 to 63 bytes"):
                first.handoff(input_ids=ids, to=wrong)
        first.detach()
        second.detach()
