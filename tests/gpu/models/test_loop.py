"""Proves that the loop of kvclient-serve on a GPU answers each request as alone, in passes of all that run.

Method: the real loop on a tiny random model, requests at once of different lengths, twice, so that
the second time their prompts are in the store; greedy tokens against plain generate(); passes and those of
several requests are counted. On the emulation the layers are the same.
"""

import queue

import pytest
import torch

pytest.importorskip("kvclient._core", reason="the client's native module is not built here")
pytest.importorskip("transformers", reason="transformers is not installed")

import kvclient.hf
from kvclient.hf.speculation import PromptLookup
from kvclient.serve.engine import passes
from kvclient.serve.engine.drafting import Drafting
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from tests.gpu.models.bound import model_on
from tests.hf.zoo import prompt
from tests.serve.loop.test_loop import alone, ask, ended


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_at_once_say_what_each_says_alone(place, client, monkeypatch, drafts):
    model = model_on(place, "llama")
    together, step = [], passes.step
    monkeypatch.setattr(
        passes,
        "step",
        lambda model, tokens, *more: together.append(len(tokens)) or step(model, tokens, *more),
    )
    lengths = ((51, 19, 35), 2) if drafts else ((61, 19, 35), 1)  # what repeats itself is drafted
    texts = [prompt(n, seed=n)[0].tolist() * lengths[1] for n in lengths[0]]
    asked = [torch.tensor([text], device=place) for text in texts]
    drafting = Drafting(PromptLookup(), 4, model.config.vocab_size) if drafts else None
    options = {"block_tokens": 16, "in_place": True, "self_test": place.type != "cpu"}
    with kvclient.hf.attach(model, client, **options) as kv:
        loop = Loop(model, kv, Limits(max_batch=4, piece_tokens=48), drafting)
        for _ in range(2):
            events = queue.Queue()
            jobs = [ask(loop, ids, events, i) for i, ids in enumerate(asked)]
            ended(events, 3)
            said = [job.tokens for job in jobs]
            assert place.type != "cpu" or said == alone(model, kv, asked)  # fp16 there: rounding may differ
            assert all(map(len, said))
        assert loop.stats()["device"] == str(model.device) and max(together) == 3
        loop.close()
