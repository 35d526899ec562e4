"""kvclient.hf and the disk tier: a prompt's blocks come from disk if that is sooner than computing them.

Tiny random models. What is sooner is decided by two measured numbers; the tests set one of them, and no test
depends on how fast this machine is.
"""

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.request import load_or_compute as pace_module
from kvclient.hf.request.load_or_compute import UNMEASURED_WAIT_S, PrefillSpeed, WaitBudget
from tests.daemon.disk.test_disk_tier import files
from tests.hf.inside import AUTO
from tests.hf.zoo import build, generate, prompt

BLOCK = 16


@pytest.fixture
def served(daemon, tmp_path):
    return daemon(
        memory="16MiB",
        args=(
            *("--disk", str(tmp_path / "blocks"), "--disk-quota", "1GiB", "--disk-write-priority", "0"),
            *("--max-blocks", "8192", "--fresh"),
        ),
    )


@pytest.fixture
def patient(monkeypatch):
    """A tiny model computes its prompt in a millisecond: nobody would wait for a disk on a busy machine."""
    monkeypatch.setattr(PrefillSpeed, "patience_s", lambda self, client, tokens, *length_bytes: 30.0)


@pytest.fixture
def model():
    model = build("llama")
    kvclient.hf.self_test(model)
    return model


def test_a_prompt_comes_back_from_disk_after_a_cold_restart(served, model, patient, wait_until, tmp_path):
    ids = prompt(70)
    plain, *_ = generate(model, ids)
    with served.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        wait_until(lambda: len(files(tmp_path)) >= 4, "the blocks are written")
        chain = kvclient.chain(kv.identity, ids[0].tolist(), BLOCK)
        content_keys = {path.read_bytes()[48:80] for path in files(tmp_path)}  # docs/formats.md §6
        assert content_keys == set(chain.content_keys)
        served.restart()
        wait_until(lambda: client.stats()["on_disk"] == 4, "the directory is indexed")
        tokens, *_ = generate(model, ids)
        assert torch.equal(tokens, plain)
        assert kv.last.reused_tokens == kv.last.reused_by_tier["disk"] == 64
        assert kv.last.reused_by_tier["shm"] == 0
        tokens, *_ = generate(model, ids)
        assert torch.equal(tokens, plain)
        assert kv.last.reused_by_tier == {"shm": 64, "disk": 0, "peer": 0}


def test_a_tail_comes_back_from_disk_whole_and_only_where_it_is_worth_it(
    served, model, patient, wait_until, tmp_path, monkeypatch
):  # fmt: skip
    """Also where the prompt goes on behind it; not for one that parts from it: nothing is loaded to see."""
    ids = prompt(4 * BLOCK + 9)
    longer = torch.cat([ids, prompt(5, seed=7)], dim=1)
    parted = torch.cat([ids[:, :-3], prompt(8, seed=8)], dim=1)
    plain = {text: generate(model, text)[0] for text in (longer, parted)}
    with (
        served.connect() as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv,
        kv.keeping(tails=True),
    ):
        generate(model, ids, 1)
        wait_until(lambda: len(files(tmp_path)) >= 5, "the blocks are written")
        for text, found in ((parted, 4 * BLOCK), (longer, ids.shape[1])):
            served.restart()
            wait_until(lambda: client.stats()["on_disk"] == 5, "the directory is indexed")
            with kv.bypass(read=False):
                assert torch.equal(generate(model, text)[0], plain[text])
            assert kv.last.reused_tokens == kv.last.reused_by_tier["disk"] == found
        served.restart()
        wait_until(lambda: client.stats()["on_disk"] == 5, "the directory is indexed")
        whole = 4 * BLOCK
        patience = PrefillSpeed.patience_s

        def few(self, client, tokens, *sizes):
            return patience(self, client, tokens, *sizes) * (tokens >= whole)

        monkeypatch.setattr(PrefillSpeed, "patience_s", few)
        assert torch.equal(generate(model, longer)[0], plain[longer])
        assert kv.last.reused_tokens == whole and kv.last.disk_refused == 1


def test_a_load_that_is_slower_than_prefill_is_not_taken(served, model, wait_until, tmp_path, monkeypatch):
    ids = prompt(70)
    with served.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        plain, *_ = generate(model, ids)
        wait_until(lambda: len(files(tmp_path)) >= 4, "the blocks are written")
        served.restart()
        wait_until(lambda: client.stats()["on_disk"] == 4, "the directory is indexed")
        monkeypatch.setattr(PrefillSpeed, "prefill_s", lambda self, tokens: 1e-9)
        monkeypatch.setattr(type(client), "load_estimate_s", lambda self, length_bytes: 1.0)
        tokens, *_ = generate(model, ids)
        assert torch.equal(tokens, plain)
        assert kv.last.disk_refused == 1
        assert kv.last.reused_tokens == 0


def test_blocks_that_vanished_from_disk_are_computed(served, model, patient, wait_until, tmp_path):
    ids = prompt(70)
    plain, *_ = generate(model, ids)
    with served.connect() as client, kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        generate(model, ids)
        wait_until(lambda: len(files(tmp_path)) >= 4, "the blocks are written")
        served.restart()
        wait_until(lambda: client.stats()["on_disk"] == 4, "the directory is indexed")
        first, second, *_ = files(tmp_path)
        first.write_bytes(first.read_bytes()[:-100])
        second.unlink()
        tokens, *_ = generate(model, ids)
        assert torch.equal(tokens, plain)
        assert kv.last.reused_tokens < 64


def crowd_out(client, kv, keys):
    """Blocks of the same size and of higher priority, until the keys lie on disk only."""
    for number in range(30):
        if set(client.lookup(keys).states) == {3}:
            return
        others = kvclient.chain(bytes([number]) * 32, list(range(100 * BLOCK)), BLOCK)
        with client.create(others, kv._model_state.served.layout_id, priority=90) as writer:
            writer.seal(zero_rest=True)
    raise AssertionError("the blocks stay in memory")


@pytest.mark.parametrize("waits", [True, False])
def test_a_document_evicted_to_disk_is_found(served, model, wait_until, monkeypatch, tmp_path, waits):
    """Its records still say what a search goes by."""
    monkeypatch.setattr(PrefillSpeed, "patience_s", lambda self, client, tokens, *length_bytes: 30.0 * waits)
    document, options = prompt(100, seed=5), {"block_tokens": BLOCK, "repair": AUTO, "self_test": False}
    computed = torch.cat([prompt(21, seed=2), document, prompt(20, seed=3)], 1)
    with served.connect() as client, kvclient.hf.attach(model, client, **options) as kv:
        generate(model, computed, 1)
        keys = kv.chunker.chain(kv.identity, computed[0].tolist(), partial=True).keys
        wait_until(lambda: len(files(tmp_path)) >= len(keys), "the blocks are written")
        crowd_out(client, kv, keys)
        generate(model, torch.cat([prompt(37, seed=7), document, prompt(9, seed=4)], 1))
        wanted = 100 if waits else 0
        assert (kv.last.approximate_tokens, kv.last.approximate_from_disk) == (wanted, wanted)
        assert (kv.last.disk_refused > 0) == (not waits)
        assert kv.stats["approximate_from_disk"] == wanted


def test_pace_measures_prefill():
    class Client:
        estimate = None

        def load_estimate_s(self, length_bytes):
            return self.estimate

    pace, client = PrefillSpeed(), Client()
    assert pace.patience_s(client, 1000, 1 << 20) == UNMEASURED_WAIT_S
    pace.note(100, 1.0)
    assert pace.patience_s(client, 1000, 1 << 20) == pytest.approx(10)  # the daemon has loaded nothing yet
    client.estimate = 11.0
    assert pace.patience_s(client, 1000, 1 << 20) == 0
    client.estimate = 9.0
    assert pace.patience_s(client, 1000, 1 << 20) == pytest.approx(10)
    pace.note(100, 0.1)
    assert pace.prefill_s(100) == pytest.approx(0.73)


@pytest.mark.parametrize(("measured", "all_s"), [(False, UNMEASURED_WAIT_S), (True, 10.0)])
def test_a_disk_that_hangs_costs_a_request_one_wait(monkeypatch, measured, all_s):
    """A document per wait, none of which comes."""

    class Client:
        def load_estimate_s(self, length_bytes):
            return None  # nothing was loaded of late

    now_s = 100.0
    monkeypatch.setattr(pace_module, "monotonic", lambda: now_s)
    pace = PrefillSpeed()
    if measured:
        pace.note(100, 1.0)
    patience = WaitBudget(pace, Client(), 1000)
    waited = []
    for _ in range(20):
        waited.append(patience.wait_s(400, 1 << 20))
        now_s += waited[-1]
    assert sum(waited) == pytest.approx(all_s)
    assert waited[-1] == 0
    assert WaitBudget(pace, Client(), 1000).wait_s(400, 1 << 20) == waited[0]
