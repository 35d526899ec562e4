"""Proves that each answer is what it would be alone, whatever runs, joins, fails or is cancelled beside it.

Method: the real loop on tiny random models in fp32 (with windows, soft caps and sinks too) and the in-memory
store; greedy tokens against plain generate(), with prompts of many lengths cut into pieces, random cancels,
and a row whose sampler raises.
"""

import os
import queue
import random

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.hf.cache.ragged import RaggedLayer
from kvclient.serve.engine import passes
from kvclient.serve.engine.job import Done, Failed, Job, Token
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.scheduler import Limits, QueueFull
from tests.hf import zoo
from tests.hf.models.test_windows import olmoe
from tests.hf.zoo import build, generate, known, prompt

NEW, WAIT_S = 12, 120
LIMITS = Limits(max_batch=4, piece_tokens=64)
WIDE_HEADS = {"llama": {"head_dim": 32}}  # else its attentions, and with them its layers, are left to torch


class Letters:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(params=["llama", "gemma2", "gpt2", "gpt_oss"])
def served(request):
    model = build(request.param, layers=2, **WIDE_HEADS.get(request.param, {}))
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        loop = Loop(model, kv, LIMITS)
        yield model, kv, loop
        loop.close()


def ask(loop, ids, events, index, sampler=None, **more):
    ids = ids[0].tolist()
    job = Job(
        ids, NEW, sampler or Sampler(Sampling(temperature=0), ids), Text(Letters()),
        lambda event: events.put((index, event)), **more,
    )  # fmt: skip
    loop.submit(job)
    return job


def ended(events, count):
    out = {}
    while len(out) < count:
        index, event = events.get(timeout=WAIT_S)
        if isinstance(event, Done | Failed):
            assert index not in out, "one request heard two ends"
            out[index] = event
    return out


def alone(model, kv, prompts):
    with kv.bypass():
        return [generate(model, ids, NEW)[0][0, ids.shape[1] :].tolist()[:NEW] for ids in prompts]


def test_a_loops_layers_are_computed_by_native_cpu(served):
    model, _, _ = served
    kinds = {type(module).__name__ for module in model.modules() if "forward" in module.__dict__}
    assert kinds >= {"Linear"}
    if type(model).__name__.startswith("Llama"):
        assert kinds >= {"LlamaModel", "LlamaDecoderLayer"}, "nobody tries a step through all layers"


def test_rows_of_unequal_lengths_say_what_they_say_alone(served):
    model, kv, loop = served
    shared = prompt(200)
    prompts = [
        shared,
        prompt(33, seed=5),
        shared[:, :150],
        prompt(8, seed=9),
        shared[:, :199],
        prompt(90, seed=2),
    ]
    wanted, events = alone(model, kv, prompts), queue.Queue()
    jobs = [ask(loop, ids, events, index) for index, ids in enumerate(prompts)]
    assert all(isinstance(end, Done) for end in ended(events, len(jobs)).values())
    assert [job.tokens for job in jobs] == wanted
    assert loop.stats()["cached_tokens_total"] > 0, "what they share was computed more than once"


def test_a_row_that_fails_and_rows_that_leave_change_no_other(served):
    model, kv, loop = served

    class Breaks(Sampler):
        def pick(self, logits):
            if self._counts.total() == 3:
                raise ValueError("broken on purpose")
            return super().pick(logits)

    chance, events = random.Random(4), queue.Queue()
    prompts = [prompt(20 + 17 * index, seed=index) for index in range(8)]
    wanted = alone(model, kv, prompts)
    jobs = []
    for index, ids in enumerate(prompts):
        broken = Breaks(Sampling(temperature=0), []) if index == 3 else None
        jobs.append(ask(loop, ids, events, index, broken))
    gone = set(chance.sample([0, 1, 2, 4, 5, 6, 7], 2))
    for index in gone:
        loop.cancel(jobs[index])
    ends = {}
    while set(range(8)) - gone - set(ends):
        index, event = events.get(timeout=WAIT_S)
        if isinstance(event, Done | Failed):
            ends[index] = event
    assert isinstance(ends[3], Failed) and "broken on purpose" in ends[3].message
    for index in set(ends) - {3} - gone:
        assert jobs[index].tokens == wanted[index]


def test_a_step_that_fails_in_the_middle_is_computed_again_row_by_row(served, monkeypatch):
    model, kv, loop = served
    prompts, events = [prompt(40 + 9 * index, seed=index) for index in range(3)], queue.Queue()
    wanted = alone(model, kv, prompts)
    left, attend = [2], RaggedLayer.attend

    def breaks(layer, query, *args):
        if layer.index == 1 and query.shape[0] > 1 and left[0]:
            left[0] -= 1
            raise ValueError("broken behind the first layers' new token")
        return attend(layer, query, *args)

    monkeypatch.setattr(RaggedLayer, "attend", breaks)
    jobs = [ask(loop, ids, events, index) for index, ids in enumerate(prompts)]
    ended(events, 3)
    assert left[0] == 0 and [job.tokens for job in jobs] == wanted


def test_the_next_turn_finds_the_answer_of_the_one_before(served):
    model, kv, loop = served
    events, ids = queue.Queue(), prompt(70, seed=3)
    said = ask(loop, ids, events, 0)
    ended(events, 1)
    turn = torch.tensor([[*ids[0].tolist(), *said.tokens, *prompt(20, seed=4)[0].tolist()]])
    wanted = alone(model, kv, [turn])[0]
    before = loop.stats()["cached_tokens_total"]
    again = ask(loop, turn, events, 1)
    ended(events, 1)
    assert loop.stats()["cached_tokens_total"] - before == 80, "64 of its prompt, 16 more with the answer"
    assert again.tokens == wanted


def test_a_cancelled_request_costs_no_step_more(served):
    """Cancelled within its first token's event, so that the loop cannot have gone on by then."""
    _, _, loop = served
    events, ids = queue.Queue(), prompt(20)[0].tolist()

    def tell(event):
        assert not isinstance(event, Done | Failed)
        if isinstance(event, Token):
            loop.cancel(job)

    job = Job(ids, NEW, Sampler(Sampling(temperature=0), ids), Text(Letters()), tell)
    loop.submit(job)
    other = ask(loop, prompt(20, seed=3), events, 1)
    ended(events, 1)
    assert len(job.tokens) == 1 and len(other.tokens) == NEW
    assert loop.stats()["requests_running"] == 0


def test_two_salts_share_nothing(served):
    _, _, loop = served
    events, ids = queue.Queue(), prompt(100)
    before = loop.stats().get("cached_tokens_total", 0)
    for index, salt in enumerate((b"one", b"other")):
        ask(loop, ids, events, index, salt=salt)
        ended(events, 1)
    assert loop.stats().get("cached_tokens_total", 0) == before
    ask(loop, ids, events, 2, salt=b"one")
    ended(events, 1)
    assert loop.stats()["cached_tokens_total"] >= before + 80


def test_the_same_seed_says_the_same_beside_others(served):
    _, _, loop = served
    said = []
    for beside in (0, 3):
        events = queue.Queue()
        sampler = Sampler(Sampling(temperature=1.0, top_p=0.9, seed=7), [])
        job = ask(loop, prompt(40), events, 0, sampler)
        for index in range(beside):
            ask(loop, prompt(30 + index, seed=index + 1), events, index + 1)
        ended(events, 1 + beside)
        said.append(job.tokens)
    assert said[0] == said[1]


def test_a_full_queue_is_refused_and_an_end_is_heard():
    model = build("llama", layers=2)
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        loop, events = Loop(model, kv, Limits(max_batch=1, max_queue=2)), queue.Queue()
        refused = 0
        for index in range(12):
            try:
                ask(loop, prompt(60, seed=index), events, index)
            except QueueFull:
                refused += 1
        assert refused
        loop.close()
        ends = ended(events, 12 - refused)
        assert all(isinstance(end, Done | Failed) for end in ends.values())
    assert torch.is_grad_enabled()


def test_a_model_that_keeps_states_in_its_modules_is_refused():
    """Requests under way would overwrite each other's."""
    model = known("recurrent_gemma")
    with (
        kvclient.InMemoryClient(8 << 20) as client,
        kvclient.hf.attach(model, client, self_test=False) as kv,
        pytest.raises(kvclient.InvalidArgument, match="RecurrentGemmaForCausalLM keeps its recurrent"),
    ):
        Loop(model, kv, LIMITS)


def of_several_heads():
    """A model whose second layer has one KV head for all its queries, where its others have two."""
    model = build("llama")
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        whole = getattr(attention, name)
        half = torch.nn.Linear(whole.in_features, whole.out_features // 2, bias=False)
        half.weight = torch.nn.Parameter(whole.weight[: half.out_features].clone())
        setattr(attention, name, half)
    attention.num_key_value_groups *= 2
    return model


ZOO = [
    *zoo.SERVED, *zoo.MOVED, *zoo.LATENT, *zoo.INDEXED, *zoo.COMPRESSED, *zoo.WINDOWED,
    *(name for name in zoo.RECURRENT if name != "recurrent_gemma"),
]  # fmt: skip
# Whose steps are not as most models': one KV head was read for all where each layer has a window, and those
# of the first where layers differ; chunks were not seen; a cache of states alone was asked for its length.
FEW = ["mistral_sliding", "gemma3", "several heads", "llama4", "mamba", "lfm2"]
NAMES = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in ZOO if name not in FEW)]


@pytest.mark.parametrize("name", NAMES)
def test_every_architectures_answers_are_its_own(name):
    model, events = of_several_heads() if name == "several heads" else known(name), queue.Queue()
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv,
    ):
        prompts = [prompt(length, seed=length) for length in (9, 16, 33, 70)]
        wanted, loop = alone(model, kv, prompts), Loop(model, kv, LIMITS)
        jobs = [ask(loop, ids, events, index) for index, ids in enumerate(prompts)]
        ends = ended(events, len(jobs))
        loop.close()
    assert all(isinstance(end, Done) for end in ends.values()), ends
    assert [job.tokens for job in jobs] == wanted


def test_a_pass_that_fails_leaves_the_states_of_others_alone(monkeypatch):
    """Nothing takes a token out of a state again: those computed before it were computed twice."""
    model, events = build("lfm2"), queue.Queue()
    passed, calls = passes.score, []

    def breaks(model, cache, token, draft):
        calls.append(cache)
        if len(calls) == 6:
            raise ValueError("broken on purpose")
        return passed(model, cache, token, draft)

    monkeypatch.setattr(passes, "score", breaks)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16) as kv,
    ):
        prompts = [prompt(20 + 9 * index, seed=index) for index in range(3)]
        wanted, loop = alone(model, kv, prompts), Loop(model, kv, LIMITS)
        jobs = [ask(loop, ids, events, index) for index, ids in enumerate(prompts)]
        ends = ended(events, 3)
        loop.close()
    failed = [index for index, end in ends.items() if isinstance(end, Failed)]
    assert len(failed) == 1 and "broken on purpose" in ends[failed[0]].message
    assert [job.tokens for job in jobs if job is not jobs[failed[0]]] == [
        tokens for index, tokens in enumerate(wanted) if index not in failed
    ]


def test_no_answer_goes_on_beyond_a_window_that_is_in_no_mask():
    """The store's layers keep what the model's own drop, and it would see them."""
    model, events = olmoe(300), queue.Queue()
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, block_tokens=16) as kv:
        loop, ids = Loop(model, kv, LIMITS), prompt(300 - NEW)
        assert ask(loop, ids, events, 0) and isinstance(ended(events, 1)[0], Done)
        ask(loop, prompt(300 - NEW + 2), events, 0)
        end = ended(events, 1)[0]
        assert isinstance(end, Failed) and end.status == 400 and "a cache of 300" in end.message
        loop.close()


def test_a_loop_that_dies_ends_its_process():
    """An invariant of its own is broken: who waits would wait for nobody."""
    model = build("llama", layers=2)
    with kvclient.InMemoryClient(8 << 20) as client, kvclient.hf.attach(model, client, self_test=False) as kv:
        child = os.fork()
        if child == 0:
            try:
                loop = Loop(model, kv, LIMITS)
                loop._scheduler.next = lambda: 1 / 0
                ask(loop, prompt(20), queue.Queue(), 0)
                loop._thread.join(WAIT_S)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == os.EX_SOFTWARE
