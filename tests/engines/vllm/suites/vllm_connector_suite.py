"""A pytest plugin for vLLM's own tests of what its scheduler does with a connector, run with the engines'
Python: our connector's halves behind the mocked one. `python -m pytest -p vllm_connector_suite TESTS`, with
this folder in PYTHONPATH, a daemon's directory in KVSTORED_SUITE_DIR and a model's in KVSTORED_SUITE_MODEL.

A test programs how many tokens the mocked connector finds and which blocks fail to load. Here the program
becomes the store's state: so many of the request's blocks are put, the next is deleted, and our scheduler's
half must find the same number; before a failure the blocks that are to fail are deleted, and our worker's
half, which loads that step into tensors of its own, must report exactly those. What our half cannot be (loads
between steps, which it never does) stays as programmed. vLLM's example connector is ours too.
"""

import dataclasses
import itertools
import os
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
import vllm.distributed.kv_transfer.kv_connector.v1.example_connector as example_connector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import kvclient
import tests.v1.kv_connector.unit.utils as theirs
from kvclient.integrations.vllm.connector import KvstoredConnector
from kvclient.integrations.vllm.scheduling import KEY_BYTES, Scheduling, Step
from kvclient.integrations.vllm.transfer import Worker

DIRECTORY, MODEL = os.environ["KVSTORED_SUITE_DIR"], os.environ["KVSTORED_SUITE_MODEL"]
BLOCK, VLLM_BLOCKS = 16, 10_000
COUNT = itertools.count()
ANSWERS: Counter[str] = Counter()  # who answered what
RUNNING: list["Ours"] = []  # of the test under way

defaults = theirs.create_vllm_config.__defaults__
theirs.create_vllm_config.__defaults__ = (MODEL, *defaults[1:])  # theirs would be downloaded


class Ours:
    """Both halves of our connector on one store, in which nothing of another test is."""

    def __init__(self):
        self.client = kvclient.connect(DIRECTORY, on_error="miss", timeout_s=30.0)
        identity = f"{os.getpid()} {next(COUNT)}".encode().ljust(32)[:32]
        self.scheduling = Scheduling(
            self.client, identity, BLOCK, BLOCK, 1, 0.0, 0.0, loads=True, saves=False
        )
        self.worker = Worker(self.client, 0, 1, ["layer"], BLOCK, VLLM_BLOCKS, 5.0)
        self.worker.register({"layer": torch.zeros(VLLM_BLOCKS, 1, BLOCK, 2)})
        self.step = Step()

    def matched(self, programmed, request, computed_tokens):
        value, between_steps = programmed
        keys = self.scheduling._of(request).keys
        first = computed_tokens // BLOCK
        wanted = keys.between(first, first + value // BLOCK)
        if wanted:
            with self.client.create(wanted, self.worker._layout_id) as writer:
                for index in writer.granted:
                    writer[index].copy_layer(0, bytes(BLOCK * 8))
        behind = keys.between(first + value // BLOCK, first + value // BLOCK + 1)
        if behind:
            self.client.delete(behind)
        answer = self.scheduling.matched(request, computed_tokens)
        assert answer == value, (answer, value)
        ANSWERS["found"] += 1
        return answer, between_steps

    def meta(self, output):
        self.step = self.scheduling.step(output)
        return self.step

    def failing(self, invalid):
        """Our worker does the step, in which these blocks are gone."""
        loads = {
            number: load.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            for load in self.step.loads
            for i, number in enumerate(load.block_ids)
        }
        if not invalid <= set(loads):
            ANSWERS["failures as programmed"] += 1  # loads between steps
            return
        self.client.delete(b"".join(loads[number] for number in invalid))
        self.worker.begin(self.step)
        self.worker.finish()
        assert self.worker.take_failed() == invalid
        ANSWERS["failures"] += 1

    def close(self):
        self.scheduling.close()
        self.client.close()


class Through(Mock):
    """A programmed method whose answer goes through ours."""

    def __call__(self, *args, **kwargs):
        return self.__dict__["ours"](super().__call__(*args, **kwargs), *args, **kwargs)

    def _get_child_mock(self, **kwargs):
        return Mock(**kwargs)


def through(connector, name, ours):
    method = Through()
    method.__dict__["ours"] = ours
    setattr(connector, name, method)


mocked, output_of = theirs.create_mock_connector, theirs.create_model_runner_output


def create_mock_connector():
    connector, ours = mocked(), Ours()
    RUNNING.append(ours)
    through(connector, "get_num_new_matched_tokens", ours.matched)
    through(
        connector, "update_state_after_alloc",
        lambda _, request, blocks, tokens: ours.scheduling.allocated(request, tokens),
    )  # fmt: skip
    through(connector, "build_connector_meta", lambda _, output: ours.meta(output))

    def finished(answer, request, *blocks):
        ours.scheduling.finished(request)
        return answer

    through(connector, "request_finished", finished)
    return connector


def create_model_runner_output(*args, **kwargs):
    if kwargs.get("invalid_block_ids") and RUNNING:
        RUNNING[-1].failing(set(kwargs["invalid_block_ids"]))
    return output_of(*args, **kwargs)


theirs.create_mock_connector = create_mock_connector
theirs.create_model_runner_output = create_model_runner_output


def our_connector(config, role, kv_cache_config):
    """In the place of the example connector."""
    ANSWERS["connectors"] += 1
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.float32)
    transfer = dataclasses.replace(
        config.kv_transfer_config, kv_load_failure_policy="recompute",
        kv_connector_extra_config={"dir": DIRECTORY, "weights_digest": "suite"},
    )  # fmt: skip
    config = dataclasses.replace(config)
    config.kv_transfer_config = transfer
    cache = KVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KvstoredConnector(config, role, cache)


theirs.ExampleConnector = our_connector
example_connector.ExampleConnectorMetadata = Step  # what a test says that ours is to do: nothing
# in the test of which connectors support hybrid models' caches
KVConnectorFactory._registry["SimpleCPUOffloadConnector"] = lambda: KvstoredConnector


@pytest.fixture(autouse=True)
def _closed():
    yield
    while RUNNING:
        RUNNING.pop().close()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"OURS {dict(ANSWERS)}")
