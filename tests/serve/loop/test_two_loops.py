"""Proves that two servers of one daemon compute together what one would compute: what their requests share is
computed once, whichever of them comes first.

Method: two real loops, each on a model and a session of its own, eight requests that share most of their
prompts, half to each; every token of a prompt that was computed is counted, by both.
"""

import queue

import pytest
import torch

import kvclient.hf
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from tests.hf.zoo import build, prompt
from tests.serve.loop.test_loop import alone, ask, ended

SHARED, OWN, BLOCK = 13 * 32, 40, 32


@pytest.mark.parametrize("piece", [128, 512])
def test_eight_that_share_are_computed_once_by_two_servers(daemon, piece):
    kvstored = daemon(memory="64MiB")
    models = [build("llama", layers=2) for _ in range(2)]
    with kvstored.connect() as first, kvstored.connect() as second:
        kvs = [kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False)
               for model, client in zip(models, (first, second), strict=True)]  # fmt: skip
        loops = [Loop(model, kv, Limits(piece_tokens=piece))
                 for model, kv in zip(models, kvs, strict=True)]  # fmt: skip
        common = prompt(SHARED, seed=100)[0].tolist()
        asked = [torch.tensor([common + prompt(OWN, seed=200 + i)[0].tolist()]) for i in range(8)]
        events = queue.Queue()
        jobs = [ask(loops[i % 2], ids, events, i) for i, ids in enumerate(asked)]
        ended(events, 8)
        each = [loop.stats()["prompt_tokens_computed_total"] for loop in loops]
        for loop in loops:
            loop.close()
        wanted = alone(models[0], kvs[0], asked)
        for kv in kvs:
            kv.detach()
    assert [job.tokens for job in jobs] == wanted
    most = SHARED + 8 * OWN + 8 + piece  # who meets the other in the middle of a piece has begun its own
    assert SHARED + 8 * OWN <= sum(each) <= most, "a token each and a piece are computed again at most"
    assert min(each) >= 4 * OWN - 4, "each computed what its own requests say by themselves"
