"""The connector's two halves as vLLM calls them, for the scenes beside this file: vLLM's own requests and
hashes, its calls in its order, and no engine. A rank "computes" a block by filling it with what that rank's
block must hold. Runs with the engines' Python; its first argument is the daemon's directory.
"""

import itertools
import sys
import time
from functools import reduce
from types import SimpleNamespace
from unittest.mock import Mock

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvclient
from kvclient.integrations.vllm.connector import KvstoredConnector
from kvclient.integrations.vllm.identity import of_rank
from kvclient.integrations.vllm.scheduling import Scheduling
from kvclient.integrations.vllm.transfer import Worker

TOKENS, BLOCKS = 32, 6
PROMPT = [(7 * i + 3) % 500 for i in range(TOKENS * BLOCKS + 8)]
GARBAGE = -1.0
NUMBERS = itertools.count()
init_none_hash(sha256)
HASHER = get_request_block_hasher(TOKENS, sha256)
client = kvclient.connect(sys.argv[1], on_error="miss", timeout_s=5.0)


def request(prompt, **sampling):
    return Request(
        request_id=str(next(NUMBERS)), prompt_token_ids=prompt, pooling_params=None, block_hasher=HASHER,
        sampling_params=SamplingParams(max_tokens=9, **sampling),
    )  # fmt: skip


class Rank:
    """A worker with the tensors of its rank."""

    def __init__(self, rank, ranks):
        self.rank = rank
        self.tensors = {f"layer.{i}": torch.zeros(2 * BLOCKS + 2, 1, TOKENS, 4) for i in range(2)}
        self.worker = Worker(client, rank, ranks, list(self.tensors), TOKENS, 2 * BLOCKS + 2, 1.0)
        self.worker.register(self.tensors)

    def run(self, step, computed, garbage=False):
        """A step that computes those blocks. What vLLM hears of it: failed blocks, and the other word."""
        self.worker.begin(step)
        for layer, (name, tensor) in enumerate(self.tensors.items()):
            self.worker.load_layer(name)
            for block in computed:
                tensor[block] = GARBAGE if garbage else 100 * self.rank + 10 * layer + block + 1
            self.worker.save_layer(name)
        self.worker.finish()
        return self.worker.take_failed(), self.worker.take_ended()

    def is_right(self, blocks):
        return all(
            bool((tensor[block] == 100 * self.rank + 10 * layer + block + 1).all())
            for layer, tensor in enumerate(self.tensors.values())
            for block in blocks
        )


class Engine:
    """The scheduler's half; a request has its blocks in order, 0 first."""

    def __init__(self, identity, ranks=1, fetch_wait_s=0.0):
        self.half = Scheduling(client, identity, TOKENS, TOKENS, ranks, 0.0, fetch_wait_s, True, True)

    def new(self, asked, tokens, beside=None, local=0):
        """Its first step: so many tokens behind what is found. `beside`: another's, its blocks behind;
        `local`: tokens that vLLM's own cache has."""
        found = [self.half.matched(each, local) for each in (asked, beside) if each is not None]
        new = []
        for each, at in zip((asked, beside), found, strict=False):
            self.half.allocated(each, at)
            first = 0 if each is asked else BLOCKS + 1
            numbers = list(range(first, first + BLOCKS + 1))
            new.append(
                SimpleNamespace(req_id=each.request_id, block_ids=[numbers], num_computed_tokens=local + at)
            )
        return found[0], self._step(new, [], tokens)

    def empty(self):
        """A step that computes nothing, as vLLM makes behind a request's end."""
        return self._step([], [], 0)

    def next(self, asked, computed, tokens, resumed_in=None):
        """resumed_in: its blocks from now on, behind a preemption."""
        return self._step([], [(asked.request_id, computed)], tokens, resumed_in)

    def _step(self, new, cached, tokens, resumed_in=None):
        names = [entry.req_id for entry in new] + [name for name, _ in cached]
        return self.half.step(SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in cached],
                resumed_req_ids=set() if resumed_in is None else {name for name, _ in cached},
                new_block_ids=[None if resumed_in is None else (resumed_in,)] * len(cached),
                num_computed_tokens=[at for _, at in cached],
            ),
            num_scheduled_tokens=dict.fromkeys(names, tokens),
        ))  # fmt: skip

    def keys_of(self, prompt):
        """Of all full blocks of a prompt."""
        return self.half._of(request(prompt)).keys.between(0, BLOCKS)

    def keys(self, asked):
        return self.half._running[asked.request_id].keys.between(0, BLOCKS)

    def hear(self, *ran):
        """What each rank's run() said, as vLLM tells the connector."""
        ended = reduce(lambda mine, other: mine.aggregate(other), [meta for _, meta in ran])
        output = KVConnectorOutput(
            invalid_block_ids=set().union(*[failed for failed, _ in ran]), kv_connector_worker_meta=ended
        )
        connector = SimpleNamespace(_scheduler=self.half, _compute_again=Mock())
        KvstoredConnector.update_connector_output(connector, output)


def put(keys):
    """Blocks of no matter what under these keys."""
    layout = kvclient.Layout(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8", kv_per_layer=1, block_tokens=TOKENS,
        meta_fixed=0, meta_per_token=0, layer_bytes_per_token=(8,), name="scene",
    )  # fmt: skip
    with client.create(keys, client.register_layout(layout)) as writer:
        for index in writer.granted:
            writer[index].copy_layer(0, bytes(8 * TOKENS))


def saved(step):
    return sorted(block for transfer in step.saves for block in transfer.block_ids)


def states(keys, rank=0, ranks=1):
    return client.lookup(of_rank(keys, rank, ranks)).states


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
