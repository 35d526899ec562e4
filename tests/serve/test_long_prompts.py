"""Proves that a long prompt which is computed in pieces says, finds and tells what it does in one pass, and
that who comes while it is computed is answered before its end.

Method: the real loop on tiny models in fp32, let go step by step by the test; the same prompts, codecs and
kinds of reuse through generate() in one pass, each over a store of its own; disk, steps of the store that
fail behind any number of good ones, passes that fail, clients that leave, others that share. Blocks that are
claimed while the loop does something else are never waited for by it: that would be for its own.
"""

import queue
import warnings

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.cache.ragged import RaggedLayer
from kvclient.hf.request.load_or_compute import PrefillSpeed
from kvclient.hf.request.tolerance import Rest
from kvclient.serve.engine.job import Done, Failed, Job, Prompt, Token
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.scheduler import Limits
from tests.daemon.disk.test_disk_tier import files
from tests.hf.store.test_store_fails import fail
from tests.hf.zoo import build, prompt
from tests.serve.hostile.test_store_fails import FAILS, in_turn
from tests.serve.loop.test_joining import ALL, Stepped
from tests.serve.loop.test_loop import Letters, alone, ended

NEW, BLOCK = 6, 32
LIMITS = Limits(max_batch=4, piece_tokens=64)
LONG = prompt(300)  # 5 pieces of 60
REPAIR = kvclient.hf.Repair("none", min_tokens=16)


@pytest.fixture(scope="module")
def model():
    return build("llama", layers=2)


@pytest.fixture
def served(model):
    """(kv, a loop that takes a step a permit, the events of all)."""
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv,
    ):
        loop = Stepped(model, kv, LIMITS)
        yield kv, loop, queue.Queue()
        loop.close()


class Shown(Sampler):
    """Remembers what it chose from."""

    def __init__(self, ids):
        super().__init__(Sampling(temperature=0), ids)
        self.seen = []

    def pick(self, logits):
        self.seen.append(logits.clone())
        return super().pick(logits)


def ask(loop, ids, events, index=0, new=NEW, **more):
    """apart: computed by generate(), as all long prompts that are alone were once."""
    ids = ids[0].tolist()
    job = Job(ids, new, Shown(ids), Text(Letters()), lambda event: events.put((index, event)), **more)
    loop.submit(job)
    return job


def joined(*parts):
    return torch.cat(parts, dim=1)


ASKED = [
    LONG,
    LONG,
    joined(LONG[:, :200], prompt(150, seed=2)),
    joined(prompt(90, seed=3), LONG[:, 32:], prompt(40, seed=4)),
    joined(LONG[:, :290], prompt(200, seed=5)),
]


def in_turn_asked(model, apart, codec, repair):
    """What each said and was told, its logits, and how many pieces it had."""
    said, logits, pieces = [], [], []
    with (
        warnings.catch_warnings(),
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False, repair=repair) as kv,
    ):
        warnings.simplefilter("ignore")
        loop, events = Loop(model, kv, LIMITS), queue.Queue()
        for ids in ASKED:
            job = ask(loop, ids, events, codec=codec, apart=apart)
            assert isinstance(ended(events, 1)[0], Done)
            first, counts = job.first, loop.stats()
            told = (first.cached_tokens, first.from_disk, first.from_peer, first.approximate_tokens)
            said.append((job.tokens, told, job.exact, counts["prompt_tokens_computed_total"]))
            logits.append(torch.stack(job.sampler.seen))
            pieces.append(job.pieces)
        stats = kv.stats
        loop.close()
    names = ("published_blocks", "published_full_blocks", "reused_tokens", "full_tokens")
    return said, [stats[name] for name in names], logits, pieces


@pytest.mark.parametrize("repair", [None, REPAIR, "auto"], ids=["exact", "inside", "uncalibrated"])
@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_what_is_said_and_told_is_that_of_one_pass(model, codec, repair):
    wanted = in_turn_asked(model, True, codec, repair)
    found = in_turn_asked(model, False, codec, repair)
    assert found[:2] == wanted[:2]
    for one_pass, pieces in zip(wanted[2], found[2], strict=True):
        assert torch.allclose(one_pass, pieces, atol=1e-4, rtol=0)
    assert wanted[3][0] == 1 and found[3][0] == (5 if repair != REPAIR else 1)


def test_who_comes_meanwhile_is_answered_before_its_end(model, served, wait_until):
    kv, loop, events = served
    short = prompt(20, seed=7)
    long = ask(loop, LONG, events, 0)
    loop.go_on(2)
    wait_until(lambda: long.pieces > 0, "its first piece is computed")
    late = ask(loop, short, events, 1)
    loop.go_on(ALL)
    heard = [events.get(timeout=120) for _ in range(2)]
    kinds = [(index, type(event)) for index, event in heard]
    assert kinds == [(1, Prompt), (1, Token)], "the prompt that was there first was computed to its end"
    ended(events, 2)
    assert [long.tokens, late.tokens] == [answer[:NEW] for answer in alone(model, kv, [LONG, short])]


def test_nothing_kept_is_no_reason_for_one_pass(model, served, wait_until):
    kv, loop, events = served
    job = ask(loop, LONG, events, write=False, read=False)
    loop.go_on(ALL)
    ended(events, 1)
    assert job.pieces == 5 and job.tokens == alone(model, kv, [LONG])[0][:NEW]


def begun(served, wait_until, pieces=2, **more):
    """A long prompt of which so many pieces are computed, and no more until the loop goes on."""
    _, loop, events = served
    job = ask(loop, LONG, events, 0, **more)
    loop.go_on(pieces)
    wait_until(lambda: job.pieces == pieces, "they are computed")
    return job


def states(kv, ids):
    """Of the prompt's whole blocks: in memory, being written, pins."""
    chain = kv.chunker.chain(kv.identity, ids[0].tolist())
    found = kv.client.lookup(chain)
    return found.resident, found.pending, kv.client.stats()["pins"]


def test_what_its_pieces_filled_is_there_for_others_and_what_is_to_come_is_claimed(served, wait_until):
    kv, _, _ = served
    begun(served, wait_until)
    assert states(kv, LONG)[:2] == (120 // BLOCK, 9 - 120 // BLOCK)


@pytest.mark.parametrize("end", ["leaves", "closed"])
def test_a_prompt_that_ends_in_its_middle_keeps_what_it_computed_and_claims_nothing(served, wait_until, end):
    kv, loop, events = served
    job = begun(served, wait_until)
    if end == "leaves":
        loop.cancel(job)
        loop.go_on(1)
        wait_until(lambda: job.entry is None, "the loop heard it")
    else:
        loop.close()
        assert isinstance(ended(events, 1)[0], Failed)
    wait_until(lambda: states(kv, LONG) == (120 // BLOCK, 0, 0), "what was claimed is given back")


def test_one_that_shares_waits_for_its_end_and_computes_only_what_is_missing(model, served, wait_until):
    """It would be computed first, as less of it is left."""
    kv, loop, events = served
    begun(served, wait_until)
    other = joined(LONG[:, :145], prompt(20, seed=8))
    late = ask(loop, other, events, 1)
    loop.go_on(ALL)
    ended(events, 2)
    assert late.tokens == alone(model, kv, [other])[0][:NEW] and kv.stats["followed_lost"] == 0
    assert late.first.cached_tokens == 145
    assert loop.stats()["prompt_tokens_computed_total"] == 300 + 20


def test_one_that_only_generate_can_compute_waits_for_no_block_of_its_own_thread(model, served, wait_until):
    """It would stand still until its patience is over, and the loop with it."""
    kv, loop, events = served
    begun(served, wait_until)
    shorter = LONG[:, :170]  # so that its turn comes first
    late = ask(loop, shorter, events, 1, prompt_logprobs=1)
    loop.go_on(ALL)
    ended(events, 2)
    assert late.tokens == alone(model, kv, [shorter])[0][:NEW] and kv.stats["followed_lost"] == 0


@pytest.mark.parametrize("broken", [0, 1, 3, 4])
def test_a_piece_that_fails_leaves_the_prompt_to_generate(model, served, monkeypatch, caplog, broken):
    kv, loop, events = served
    passed, attend = [], RaggedLayer.attend

    def breaks(layer, query, *args):
        passed.append(layer.index == 1 and query.shape[0] > 1)
        if passed[-1] and sum(passed) == broken + 1:
            raise ValueError("broken behind the first layer")
        return attend(layer, query, *args)

    monkeypatch.setattr(RaggedLayer, "attend", breaks)
    job = ask(loop, LONG, events)
    loop.go_on(ALL)
    assert isinstance(ended(events, 1)[0], Done) and sum(passed) == broken + 1
    told = "a piece of a prompt failed" in caplog.text and "broken behind the first layer" in caplog.text
    assert told or broken == 4  # the last goes with a step
    assert job.tokens == alone(model, kv, [LONG])[0][:NEW] and states(kv, LONG)[1:] == (0, 0)


@pytest.mark.parametrize(("step", "error"), in_turn(FAILS))
@pytest.mark.filterwarnings("ignore:generate.. goes on")
def test_a_store_that_fails_in_its_middle_ends_nothing(model, served, monkeypatch, step, error):
    kv, loop, events = served
    loop.go_on(1 << 20)
    asked = [LONG, joined(LONG[:, :200], prompt(150, seed=2))]
    wanted = [answer[:NEW] for answer in alone(model, kv, asked)]
    for good in (0, 2, 7):
        salt = b"%d" % good
        with monkeypatch.context() as patch:
            fail(patch, FAILS[step], error, good)
            for ids, answer in zip(asked, wanted, strict=True):
                job = ask(loop, ids, events, salt=salt)
                assert isinstance(ended(events, 1)[0], Done) and job.tokens == answer
        kv._rest = Rest()
        job = ask(loop, asked[0], events, salt=salt)
        assert isinstance(ended(events, 1)[0], Done) and job.tokens == wanted[0]
    for _ in range(2):
        ask(loop, asked[0], events)
        ended(events, 1)
    assert kv.last.reused_tokens == 299, "the store is back"


def test_what_lies_on_disk_is_found_and_told_as_in_one_pass(model, daemon, tmp_path, monkeypatch, wait_until):
    """Pieces that met in the store were told that it is not cached, and loaded it one by one."""
    monkeypatch.setattr(PrefillSpeed, "patience_s", lambda self, client, tokens, *length_bytes: 30.0)
    place = ("--disk", str(tmp_path / "blocks"), "--disk-quota", "1GiB", "--disk-write-priority", "0")
    kvstored = daemon(memory="16MiB", args=(*place, "--max-blocks", "8192", "--fresh"))
    longer = joined(LONG[:, :288], prompt(220, seed=9))
    with (
        kvstored.connect() as client,
        kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv,
    ):
        loop, events = Loop(model, kv, LIMITS), queue.Queue()
        ask(loop, LONG[:, :288], events)
        ended(events, 1)
        wait_until(lambda: len(files(tmp_path)) >= 9, "the blocks are written")
        told = []
        for apart in (True, False):
            kvstored.restart()
            wait_until(lambda: client.stats()["on_disk"] >= 9, "the directory is indexed")
            job = ask(loop, longer, events, apart=apart, write=False)
            ended(events, 1)
            told.append((job.first.cached_tokens, job.first.from_disk, job.tokens))
        loop.close()
    assert told[0] == told[1] and told[0][:2] == (288, 288)
    assert job.pieces == 4
