"""vLLM's own scheduler with the connector's half in it, where a load fails: what it has computed again, by
whom, and which tokens it delivers. No engine: what the workers would say is said here. Run with the engines'
Python.

    python -m tests.engines.vllm.steps.vllm_scheduler_scene DIRECTORY MODEL

Asserts for itself.
"""

import sys
from unittest.mock import Mock, patch

from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvclient.integrations.vllm import connector
from tests.engines.vllm.steps.vllm_halves import PROMPT, TOKENS, client, put, request
from tests.engines.vllm.vllm_identities import cache_of, config_of

DIRECTORY, MODEL = sys.argv[1:3]
FULL = 3  # blocks of PROMPT that are in the store


class Vllm:
    """A scheduler of vLLM's, with a connector."""

    def __init__(self, kind, role="kv_both", blocks=64):
        transfer = KVTransferConfig(
            kv_connector="KvstoredConnector", kv_connector_module_path="kvclient.integrations.vllm",
            kv_role=role, kv_load_failure_policy="recompute",
            kv_connector_extra_config={"dir": DIRECTORY, "weights_digest": kind.__name__, "timeout_s": 30.0},
        )  # fmt: skip
        config = config_of(MODEL, kv_transfer_config=transfer, block_size=TOKENS, max_num_batched_tokens=4096)
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = kind(config, cache_of(blocks=blocks), Mock(), block_size=TOKENS)
        self.half = self.scheduler.connector._scheduling

    def add(self, *requests):
        for asked in requests:
            self.scheduler.add_request(asked)

    def store(self, asked, count):
        put(self.half._of(asked).keys.between(0, count))

    def schedule(self):
        return self.scheduler.schedule()

    def ran(self, output, tokens, failed=()):
        """What the workers say of a step: the token that they gave each request, and blocks that did not
        come."""
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[tokens[name]] if name in tokens else [] for name in names],
            kv_connector_output=KVConnectorOutput(invalid_block_ids=set(failed)),
        ))  # fmt: skip


def loaded(output):
    """vLLM's blocks that the step loads."""
    return [number for load in output.kv_connector_metadata.loads for number in load.block_ids]


def a_step_sent_ahead_of_a_failed_load_delivers_nothing():
    vllm, asked = Vllm(AsyncScheduler), request(PROMPT)
    vllm.add(asked)
    vllm.store(asked, FULL)
    name = asked.request_id
    first = vllm.schedule()
    assert len(loaded(first)) == FULL
    ahead = vllm.schedule()
    assert ahead.num_scheduled_tokens == {name: 1}, "it goes on with a token that nobody knows yet"
    vllm.ran(first, {name: 7}, failed=loaded(first)[1:2])
    vllm.ran(ahead, {name: 8})
    assert list(asked.output_token_ids) == [], "both stand on a block that was not loaded"
    again = vllm.schedule()
    assert again.num_scheduled_tokens == {name: len(PROMPT) - TOKENS} and not loaded(again)
    behind = vllm.schedule()
    vllm.ran(again, {name: 9})
    vllm.ran(behind, {name: 10})
    assert list(asked.output_token_ids) == [9, 10]


def a_request_that_is_preempted_before_its_load_has_failed_delivers_nothing():
    """Of an engine that only loads, too: of one that saves vLLM drops what comes behind a preemption."""
    older, asked = request([5] * 2 * TOKENS), request(PROMPT[: FULL * TOKENS + 8])
    vllm = Vllm(AsyncScheduler, "kv_consumer", blocks=1 + 2 + FULL + 1)  # and vLLM's null block
    vllm.add(older, asked)
    vllm.store(asked, FULL)
    first = vllm.schedule()
    assert len(loaded(first)) == FULL
    ahead = vllm.schedule()
    assert ahead.num_scheduled_tokens == {older.request_id: 1} and asked.status == RequestStatus.PREEMPTED
    vllm.ran(first, {older.request_id: 7, asked.request_id: 8}, failed=loaded(first)[:1])
    assert (list(older.output_token_ids), list(asked.output_token_ids)) == ([7], [])


def who_shares_blocks_that_did_not_come_computes_them_too():
    """vLLM sets back the first alone, which may be given up before it has computed them."""
    vllm = Vllm(Scheduler)
    first, beside = request(PROMPT), request([*PROMPT[: FULL * TOKENS], *range(TOKENS)])
    vllm.add(first, beside)
    vllm.store(first, FULL)
    output = vllm.schedule()
    assert len(loaded(output)) == FULL and output.num_scheduled_tokens[beside.request_id] == TOKENS
    vllm.ran(output, {first.request_id: 7, beside.request_id: 8}, failed=loaded(output)[1:])
    vllm.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
    behind = request([*PROMPT[: FULL * TOKENS], 5, 6, 7])
    vllm.add(behind)
    client.delete(vllm.half._of(first).keys.between(0, FULL))
    output = vllm.schedule()
    scheduled = output.num_scheduled_tokens
    assert scheduled == {beside.request_id: FULL * TOKENS, behind.request_id: 3}, scheduled


def without_the_scheduler_vllm_computes_the_first_again():
    """A call that comes from elsewhere does not end the engine."""
    vllm, asked = Vllm(Scheduler), request(PROMPT[: FULL * TOKENS + 9])
    vllm.add(asked)
    vllm.store(asked, FULL)
    output = vllm.schedule()
    with patch.object(connector, "_vllms_scheduler", lambda: None):
        vllm.ran(output, {asked.request_id: 7}, failed=loaded(output)[1:2])
    assert list(asked.output_token_ids) == []
    assert vllm.schedule().num_scheduled_tokens == {asked.request_id: (FULL - 1) * TOKENS + 9}


for scene in (
    a_step_sent_ahead_of_a_failed_load_delivers_nothing,
    a_request_that_is_preempted_before_its_load_has_failed_delivers_nothing,
    who_shares_blocks_that_did_not_come_computes_them_too,
    without_the_scheduler_vllm_computes_the_first_again,
):
    scene()
print("PASSED", flush=True)
