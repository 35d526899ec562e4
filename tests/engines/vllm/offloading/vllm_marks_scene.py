"""A scene with the marks by which the offloading spec's processes tell each other what cannot be told by
vLLM: what is being computed, and whose self-test passed. Run with the engines' Python, without an engine.

    python -m tests.engines.vllm.offloading.vllm_marks_scene DIRECTORY
"""

import os
import time

from vllm.v1.kv_offload.base import LookupResult, ReqContext

import kvclient
from kvclient.integrations.marks import Word, word_name
from tests.engines.vllm.offloading.vllm_spec_parts import (
    CONTEXT,
    DIRECTORY,
    KEYS,
    answers,
    client,
    manager,
    names,
    put,
)  # fmt: skip


def engine(**options):
    return manager(names(model_version="marks"), **{"wait_pending_s": 3600.0, **options})


def until(answer, offloading):
    deadline = time.monotonic() + 60
    while offloading.lookup(KEYS[-1], ReqContext(req_id=os.urandom(4).hex())) is not answer:
        assert time.monotonic() < deadline, answer


def what_is_computed_is_waited_for_before_a_byte_of_it_is_stored():
    """The marks go when it was stored, when the engine forgets all, and with the engine."""
    patient, impatient, blocks = engine(), engine(wait_pending_s=0.0), client.stats()["blocks"]
    for end in ("stored", "reset", "death"):
        computing = engine()
        assert list(computing.prepare_store(KEYS, CONTEXT).keys_to_store) == KEYS
        until(LookupResult.HIT_PENDING, patient)
        assert impatient.lookup(KEYS[0], CONTEXT) is LookupResult.MISS
        assert list(patient.prepare_store(KEYS, CONTEXT).keys_to_store) == KEYS, "who computes it stores it"
        patient.complete_store(KEYS, CONTEXT)
        if end == "stored":
            computing.complete_store(KEYS, CONTEXT)
        elif end == "reset":
            computing.reset_cache()
        else:
            computing._client.close()
        until(LookupResult.MISS, patient)
        computing.shutdown()
    brief = engine(lease_s=0.2)
    brief.prepare_store(KEYS, CONTEXT)
    until(LookupResult.HIT_PENDING, patient)
    until(LookupResult.MISS, patient)  # nobody said more of it
    for made in (brief, patient, impatient):
        made.shutdown()
    assert client.stats()["blocks"] == blocks


def nothing_is_promised_before_all_workers_were_tried():
    naming, words = names(model_version="words"), [word_name("an engine", rank) for rank in range(2)]
    put(naming)
    offloading = manager(naming, words=words)
    workers = [kvclient.connect(DIRECTORY, on_error="miss") for _ in words]
    promises = [Word(worker, word) for worker, word in zip(workers, words, strict=True)]
    for word in promises:
        assert answers(offloading, KEYS) == [False] * len(KEYS)
        word.give()
    assert answers(offloading, KEYS, "another") == [True] * len(KEYS)
    for made in (*workers, offloading._client):
        made.close()


what_is_computed_is_waited_for_before_a_byte_of_it_is_stored()
nothing_is_promised_before_all_workers_were_tried()
print("PASSED", flush=True)
