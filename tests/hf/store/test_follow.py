"""Two processes that start the same prompt at once compute it once: following a writer layer by layer, and
its death.

The fake's sessions stand for processes, threads run them; the writer stops where the test says, on a
condition. The same with real processes and a real daemon is tests/hf/models/test_smollm2.py and `make demo`.
"""

import threading

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.testing import in_memory_blocks, in_memory_writer
from tests.hf.zoo import build, generate, prompt

BLOCK = 16
WAIT_S = 20.0


class Gate:
    """Stops one session's writers before they publish a layer of their last block, until it is opened."""

    def __init__(self, session, layer):
        self.session, self.layer = session, layer
        self.reached, self.opened = threading.Event(), threading.Event()
        self.error = None

    def pass_through(self, block, index):
        if block._writer.client.session is self.session and index == self.layer:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            if self.error is not None:
                raise self.error


@pytest.fixture
def gate(monkeypatch):
    gates = []
    original = in_memory_writer.GrantedBlock.mark_layer

    def mark_layer(self, index):
        for gate in gates:
            gate.pass_through(self, index)
        original(self, index)

    monkeypatch.setattr(in_memory_writer.GrantedBlock, "mark_layer", mark_layer)

    def make(client, layer):
        gates.append(Gate(client.session, layer))
        return gates[-1]

    yield make
    for gate in gates:
        gate.opened.set()


@pytest.fixture
def waits(monkeypatch):
    """(client, layer) of each wait for a layer that begins. Pins come before: who has them has not looked yet
    whether the block is sealed."""
    seen = []
    original = in_memory_blocks.BlockView.wait_layer

    def wait_layer(self, layer, timeout_s=None):
        seen.append((self._client, layer))
        original(self, layer, timeout_s)

    monkeypatch.setattr(in_memory_blocks.BlockView, "wait_layer", wait_layer)
    return seen


class Call(threading.Thread):
    """generate() in another thread, on a model of its own."""

    def __init__(self, model, ids, **options):
        super().__init__(daemon=True)
        self.model, self.ids, self.given = model, ids, options
        self.tokens = self.error = None
        self.start()

    def run(self):
        try:
            self.tokens = generate(self.model, self.ids, **self.given)[0]
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(WAIT_S)
        assert not self.is_alive(), "generate() did not end"
        return self.tokens


@pytest.fixture
def pair():
    """Two attached models on one store: (client, model, kv) each."""
    kvclient.hf.self_test(build("llama"))
    with kvclient.InMemoryClient(64 << 20) as store, store.another() as other:
        made = []
        for client in (store, other):
            model = build("llama")
            made.append(
                (
                    client,
                    model,
                    kvclient.hf.attach(model, client, block_tokens=BLOCK, follow_timeout_s=WAIT_S),
                )
            )
        yield made
        for _, _, kv in made:
            kv.detach()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_who_comes_second_follows_and_computes_nothing_twice(pair, gate, waits, layer, wait_until):
    (store, writer, first), (other, follower, second) = pair
    ids = prompt(70)
    plain, *_ = generate(build("llama"), ids)
    closed = gate(store, layer)
    writing = Call(writer, ids)
    assert closed.reached.wait(WAIT_S)
    following = Call(follower, ids)
    wait_until(lambda: (other, layer) in waits, "the follower's wait for the layer that does not come")
    assert store.stats()["pins"] == 4
    closed.opened.set()
    assert torch.equal(writing.result(), plain)
    assert torch.equal(following.result(), plain)
    assert (first.last.reused_tokens, first.last.published_blocks) == (0, 4)
    assert (second.last.reused_tokens, second.last.followed_tokens, second.last.published_blocks) == (
        64,
        64,
        0,
    )
    assert second.last.wait_s > 0
    assert store.stats()["pins"] == 0


def test_a_follower_publishes_what_lies_beyond(pair, gate, waits, wait_until):
    """Its own later blocks are granted to it at once, and written in the same pass."""
    (store, writer, _), (other, follower, second) = pair
    short, long = prompt(70)[:, :40], prompt(70)
    plain, *_ = generate(build("llama"), long)
    closed = gate(store, 1)
    writing = Call(writer, short)
    assert closed.reached.wait(WAIT_S)
    following = Call(follower, long)
    wait_until(lambda: (other, 1) in waits, "the follower's wait")
    assert store.stats()["pins"] == 2
    closed.opened.set()
    writing.result()
    assert torch.equal(following.result(), plain)
    assert (second.last.followed_tokens, second.last.published_blocks) == (32, 2)
    assert store.stats()["blocks"] == 4


def test_a_writer_that_dies_between_the_wait_and_the_read(pair, gate, monkeypatch):
    """That is a writer who was followed and ended, no failure of the store."""
    (store, writer, _), (_, follower, second) = pair
    ids = prompt(70)
    plain, *_ = generate(build("llama"), ids)
    closed = gate(store, 2)
    writing = Call(writer, ids)
    assert closed.reached.wait(WAIT_S)
    fits, looked = BlockFormat.fits, []

    def looks(form, view, tokens, layer):
        found = fits(form, view, tokens, layer)
        looked.append(layer)
        if looked.count(1) == 4 and writing.is_alive():  # all blocks of the prompt have this layer
            closed.error = KeyboardInterrupt()
            closed.opened.set()
            writing.join(WAIT_S)
        return found

    monkeypatch.setattr(BlockFormat, "fits", looks)
    tokens, *_ = generate(follower, ids)
    assert isinstance(writing.error, KeyboardInterrupt) and torch.equal(tokens, plain)
    assert (second.last.followed_lost, second.last.store_error) == (1, None)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_writer_that_dies_costs_its_followers_time_only(pair, gate, waits, layer, wait_until):
    (store, writer, _), (other, follower, second) = pair
    ids = prompt(70)
    plain, *_ = generate(build("llama"), ids)
    closed = gate(store, layer)
    writing = Call(writer, ids)
    assert closed.reached.wait(WAIT_S)
    following = Call(follower, ids)
    wait_until(lambda: (other, layer) in waits, "the follower's wait")
    closed.error = KeyboardInterrupt()
    closed.opened.set()
    writing.result()
    assert isinstance(writing.error, KeyboardInterrupt)
    assert torch.equal(following.result(), plain)
    assert second.last.followed_lost == 1
    assert (second.last.reused_tokens, second.last.published_blocks) == (0, 4)
    assert store.stats()["created"] == 0
    tokens, *_ = generate(writer, ids)
    assert torch.equal(tokens, plain)


def test_a_writer_that_stands_still_is_not_waited_for(pair, gate):
    (store, writer, _), (other, follower, second) = pair
    second.detach()
    ids = prompt(70)
    plain, *_ = generate(build("llama"), ids)
    closed = gate(store, 1)
    writing = Call(writer, ids)
    assert closed.reached.wait(WAIT_S)
    with kvclient.hf.attach(follower, other, block_tokens=BLOCK, follow_timeout_s=0.05) as impatient:
        assert torch.equal(Call(follower, ids).result(), plain)
        assert impatient.last.followed_lost == 1
        assert impatient.last.reused_tokens == 0
        assert impatient.last.published_blocks == 0, "the blocks are still the other's"
    closed.opened.set()
    assert torch.equal(writing.result(), plain)
    assert store.stats()["blocks"] == 4


def test_following_can_be_switched_off(pair, gate):
    (store, writer, _), (other, follower, second) = pair
    second.detach()
    ids = prompt(70)
    closed = gate(store, 1)
    writing = Call(writer, ids)
    assert closed.reached.wait(WAIT_S)
    with kvclient.hf.attach(follower, other, block_tokens=BLOCK, follow=False) as alone:
        Call(follower, ids).result()
        assert (alone.last.reused_tokens, alone.last.followed_lost) == (0, 0)
    closed.opened.set()
    writing.result()


def test_two_batches_that_want_each_others_rows_do_not_wait_for_each_other(pair, gate):
    """Row 1 of one is row 2 of the other: both hold a block the other wants."""
    (store, writer, _first), (_, follower, second) = pair
    rows = torch.cat([prompt(40), prompt(40, seed=2), prompt(40, seed=3)])
    plain, *_ = generate(build("llama"), rows)
    closed = gate(store, 0)
    writing = Call(writer, rows[[0, 1]])
    assert closed.reached.wait(WAIT_S)
    tokens = Call(follower, rows[[1, 2]]).result()  # while the writer stands still
    assert torch.equal(tokens[:, 40:], plain[[1, 2], 40:])
    assert second.last.wait_s == 0
    assert second.last.published_blocks == 2
    closed.opened.set()
    assert torch.equal(writing.result()[:, 40:], plain[[0, 1], 40:])


def test_many_threads_on_one_model(pair):
    """One attachment serves several threads; each call has its own report."""
    (_, model, kv), _ = pair
    prompts = [prompt(40 + 8 * number, seed=number % 2) for number in range(6)]
    plain = [generate(build("llama"), ids)[0] for ids in prompts]
    calls = [Call(model, ids) for ids in prompts]
    for call, expected in zip(calls, plain, strict=True):
        assert torch.equal(call.result(), expected)
    assert kv.stats["requests"] == len(prompts)
    assert kv.client.stats()["pins"] == 0
