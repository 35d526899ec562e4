"""A handoff names the host that prefills and the keys of its blocks: the decoder asks that host for these
blocks before any other; a name that helps nobody costs no token; what it says is bounded, and keys that are
not those of its tokens are refused.

Real daemons and tiny random models; of what from_json() takes, texts alone.
"""

import base64
import contextlib
import dataclasses
import json
import os
import random

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import Handoff
from kvclient.hf.handoff.prompts import MOST_KEYS
from tests.hf.zoo import build, generate, prompt
from tests.hosts.handoff.test_handoff import BLOCK, WAIT_S, resumed
from tests.hosts.hosts import Hosts, told


@pytest.fixture
def three(daemon, tmp_path, wait_until):
    """(hosts, an attachment on each)"""
    hosts = Hosts(daemon, tmp_path, 3).start().wait_up(wait_until)
    with contextlib.ExitStack() as ends:
        made = []
        for host in hosts.made:
            client = ends.enter_context(host.connect())
            made.append(kvclient.hf.attach(build("llama"), client, block_tokens=BLOCK, self_test=False))
            ends.callback(made[-1].detach)
        yield hosts, made


def fetched(hosts, i: int) -> dict[str, int]:
    return {node: peer["fetched"] for node, peer in hosts.peers(i).items() if node != "server"}


def changed(handoff, **said) -> str:
    return json.dumps({**json.loads(handoff.to_json()), **said})


@pytest.mark.parametrize("named", ["n0", "n1"])
def test_the_host_that_it_names_is_asked_for_what_two_have(three, named):
    """Both have every block: without a name now the one and now the other would be asked."""
    hosts, (first, second, third) = three
    handoffs = [first.handoff(input_ids=prompt(60, seed=seed)) for seed in range(8)]
    for handoff in handoffs:
        assert handoff.wait(WAIT_S) and handoff.node == "n0"
        assert resumed(second, handoff)[0].shape[1] == 68
        told(third.client, handoff.keys)
    assert fetched(hosts, 1) == {"n0": 4 * 8, "n2": 0}
    for handoff in handoffs:
        ids = torch.tensor([handoff.token_ids])
        found, _ = resumed(third, dataclasses.replace(handoff, node=named))
        assert torch.equal(found, generate(build("llama"), ids)[0])
        assert third.last.reused_tokens == 59
    assert fetched(hosts, 2) == {"n0": 0, "n1": 0, named: 4 * 8}


def test_a_host_that_is_named_and_none_or_down_costs_no_token(three):
    hosts, (first, second, third) = three
    handoff = first.handoff(input_ids=prompt(60))
    tokens, *_ = generate(build("llama"), prompt(60))
    assert handoff.wait(WAIT_S)
    found, _ = resumed(second, dataclasses.replace(handoff, node="nobody"))
    assert torch.equal(found, tokens) and second.last.reused_tokens == 59
    told(third.client, handoff.keys)
    hosts[0].kill()
    found, _ = resumed(third, handoff)  # the second has them by now
    assert torch.equal(found, tokens) and third.last.reused_tokens == 59
    assert fetched(hosts, 2) == {"n0": 0, "n1": 4}


def test_its_keys_are_those_of_its_tokens_or_it_is_refused(three):
    _, (first, second, _) = three
    handoff, other = (first.handoff(input_ids=prompt(60, seed=seed)) for seed in (1, 2))
    assert handoff.wait(WAIT_S) and other.wait(WAIT_S)
    sent = Handoff.from_json(handoff.to_json())
    assert sent == handoff and sent.keys == handoff.keys and len(sent.keys) == 4 * 32
    assert list(first.client.lookup(sent.keys).states) == [2] * 4
    one_bit = bytes([handoff.keys[0] ^ 1]) + handoff.keys[1:]
    for keys in (other.keys, one_bit, handoff.keys[32:], os.urandom(96)):
        wrong = Handoff.from_json(changed(handoff, keys=base64.b64encode(keys).decode()))
        with pytest.raises(InvalidArgument, match="its keys are not those of its tokens"):
            second.resume(wrong, max_new_tokens=2)
    tokens, *_ = generate(build("llama"), prompt(60, seed=1))
    more = handoff.keys + other.keys + os.urandom(32)  # it fetches what it does not use, and waits for none
    for said in ({}, {"keys": base64.b64encode(more).decode()}):
        found, _ = resumed(second, Handoff.from_json(changed(handoff, **said)))
        assert torch.equal(found, tokens) and second.last.reused_tokens == 59


def test_a_handoff_of_before_names_neither_and_is_resumed(three):
    hosts, (first, second, _) = three
    handoff = first.handoff(input_ids=prompt(60))
    assert handoff.wait(WAIT_S)
    said = json.loads(handoff.to_json())
    del said["node"], said["keys"]
    older = Handoff.from_json(json.dumps(said))
    assert (older.node, older.keys) == ("", b"")
    found, _ = resumed(second, older)
    assert torch.equal(found, generate(build("llama"), prompt(60))[0])
    assert second.last.reused_tokens == 59 and fetched(hosts, 1)["n0"] == 4


def test_of_more_blocks_than_it_may_name_it_names_none(three, monkeypatch):
    monkeypatch.setattr("kvclient.hf.handoff.prompts.MOST_KEYS", 3)
    _, (first, second, _) = three
    handoff = first.handoff(input_ids=prompt(60))
    assert handoff.wait(WAIT_S) and handoff.keys == b"" and handoff.node == "n0"
    resumed(second, handoff)
    assert second.last.reused_tokens == 59


# ---------------------------------------------------------------- the text

MADE = Handoff(bytes(32), ((1, 2, 3), (4,)), 16, bytes(32), 30.0, "n0", _keys=bytes(range(64)))


@pytest.mark.parametrize(
    "said",
    [
        {"node": node}
        for node in (None, 5, ["n0"], "n" * 64, "n0\0", "n\u00e9", "\ud800", "N0", "n0\n", "../n0", {"a": 1})
    ]
    + [
        {"keys": keys}
        for keys in (
            None, 5, [], ["AAAA"], {}, "AAAA", "A" * 44, "*", "\u00e9", True,
            base64.b64encode(bytes(32 * (MOST_KEYS + 1))).decode(),
        )
    ]
    + [{"lease_s": 10**400}, {"lease_s": float("nan")}, {"rows": [[]] * 70000}, {"rows": {"a": 1}}],
    ids=lambda said: f"{said!r:.40}",
)  # fmt: skip
def test_what_no_handoff_says_is_refused(said):
    with pytest.raises(InvalidArgument):
        Handoff.from_json(changed(MADE, **said))


@pytest.mark.parametrize("text", ["[" * 50000, '{"a":' * 50000, "1" * 5000, b"\xff", "nul", "{" * (1 << 20)])
def test_a_text_that_is_deep_or_none_is_refused(text):
    with pytest.raises(InvalidArgument):
        Handoff.from_json(text)


def test_texts_at_random_are_refused_or_mean_what_they_say():
    choose, text = random.Random(23), MADE.to_json()
    values = [None, True, -1, 1 << 40, 0.5, "", "n0", [], [[1]], {}, "A" * 43 + "=", [None]]
    for _ in range(4000):
        said, wrong = json.loads(text), text
        if choose.random() < 0.5:
            said[choose.choice([*said, "first"])] = choose.choice(values)
            wrong = json.dumps(said)
        else:
            at = choose.randrange(len(text))
            wrong = text[:at] + chr(choose.randrange(128)) + text[at + choose.randrange(2) :]
        try:
            made = Handoff.from_json(wrong)
        except InvalidArgument:
            continue
        again = Handoff.from_json(made.to_json())
        assert again == made and again.keys == made.keys and len(made.keys) % 32 == 0
