"""A pytest plugin for vLLM's own tests of its OffloadingConnector, run with the engines' Python: our spec in
the place of theirs. `python -m pytest -p vllm_spec_suite TESTS`, with this folder in PYTHONPATH, a
daemon's directory in KVSTORED_SUITE_DIR and a model's in KVSTORED_SUITE_MODEL.

vLLM's tests have a manager that each test programs, and a worker that only notes what it was told. Here
the program becomes the store's state: before a look-up that is to be a hit the block is put into the
store, before one that is to be a miss it is deleted, before one that is to be pending another client
begins to write it; the answer is then what our manager says, and it must be the programmed one. A transfer
that a test completes is done by our worker on the connector's own tensors, and what a load brings must be
what was stored.
"""

import itertools
import os
from collections import Counter
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput, ReqContext, ScheduleEndContext

import tests.v1.kv_connector.unit.offloading_connector.utils as theirs
import tests.v1.kv_connector.unit.utils as connectors
from kvclient.integrations.vllm.identity import each_of_rank
from kvclient.integrations.vllm.offload.scheduling import StoredBlocks
from kvclient.integrations.vllm.offload.spec import KvstoredOffloadingSpec

MODEL = os.environ["KVSTORED_SUITE_MODEL"]
COUNT = itertools.count()
ANSWERS: Counter[str] = Counter()  # who answered what
RUNNING: list["OurSpec"] = []  # of the test under way
CONTENT: dict[bytes, list[np.ndarray]] = {}  # what our worker stored under a name

defaults = connectors.create_vllm_config.__defaults__
connectors.create_vllm_config.__defaults__ = (MODEL, *defaults[1:])  # theirs would be downloaded


class Told(theirs.MockLoadStoreSpec, StoredBlocks):
    """What our manager tells our worker, with the face that the tests look at."""

    def __init__(self, keys, names):
        theirs.MockLoadStoreSpec.__init__(self, keys)
        StoredBlocks.__init__(self, names)


class Through(MagicMock):
    """A programmed method whose answer goes through ours."""

    def __call__(self, *args, **kwargs):
        answer = super().__call__(*args, **kwargs)
        return self.__dict__["ours"](answer, *args, **kwargs)

    def _get_child_mock(self, **kwargs):
        return MagicMock(**kwargs)


class Programmed:
    """The methods of our manager behind those of a programmed one."""

    def __init__(self, spec, manager):
        self.spec, self.ours = spec, spec.ours.get_manager()
        self.ours._words = ()  # of workers that a test may not have
        self.ours._claims.computing = lambda names: None  # the programmed state knows no marks
        for name in ("lookup", "prepare_store", "complete_store", "complete_load", "on_new_request",
                     "on_request_finished", "on_schedule_end"):  # fmt: skip
            method = Through(return_value=getattr(manager, name).return_value)
            method.__dict__["ours"] = getattr(self, name, None) or self._also(name)
            setattr(manager, name, method)
        manager.prepare_load = self.prepare_load

    def _also(self, name):
        def call(answer, *args, **kwargs):
            getattr(self.ours, name)(*args, **kwargs)
            return answer

        return call

    def _settled(self, key, context):
        """Our answer once what it waits for has come."""
        for _ in range(100):
            if (answer := self.ours.lookup(key, context)) is not LookupResult.RETRY:
                return answer
            self.ours.on_schedule_end(ScheduleEndContext([], ()))
            self.ours._pool.submit(int).result()
        raise AssertionError("our look-up does not end")

    def _forget(self, key):
        """As if the lease had ended."""
        self.ours._end()
        self.ours._wanted.pop(key, None)
        self.ours._pool.submit(int).result()
        held = self.ours._held.get(key)
        if held is not None and not held.loads:
            self.ours._let_go(key, held)
        for request in self.ours._requests.values():
            request.missed.discard(key)
            request.waited_until = None

    def lookup(self, wanted, key, context):
        context = ReqContext(req_id=context.req_id)  # without names of more keys: each has a program
        held = self.ours._held.get(key)
        if self.spec.worker() is None or (held is not None and held.loads and wanted is not LookupResult.HIT):
            ANSWERS["as programmed"] += 1  # no tensors in this test, or a block that is being loaded
            return wanted
        if wanted is LookupResult.HIT:
            self.spec.put(key)
            if held is None:
                self._forget(key)
            answer = self._settled(key, context)
        elif wanted is LookupResult.RETRY:
            self.spec.put(key)
            self._forget(key)
            answer = self.ours.lookup(key, context)
        else:
            self._forget(key)
            self.spec.delete(key)
            if wanted is LookupResult.HIT_PENDING:
                self.spec.begin(key)
            answer = self.ours.lookup(key, context)
        assert answer is wanted, (answer, wanted)
        ANSWERS["ours"] += 1
        return answer

    def prepare_load(self, keys, context):
        keys = list(keys)
        for key in keys:
            if key not in self.ours._held:  # told by a test without a look-up
                assert self.lookup(LookupResult.HIT, key, context) is LookupResult.HIT
        if self.spec.worker() is None:
            return theirs.MockLoadStoreSpec(keys)
        return Told(keys, self.ours.prepare_load(keys, context).names)

    def prepare_store(self, wanted, keys, context):
        if wanted is None or not isinstance(wanted, PrepareStoreOutput):
            return wanted
        keys, stored = list(keys), list(wanted.keys_to_store)
        if self.spec.worker() is None:
            return wanted
        for key in keys:
            (self.spec.delete if key in stored else self.spec.put)(key)
        output = self.ours.prepare_store(keys, context)
        assert list(output.keys_to_store) == [key for key in keys if key in stored]
        ANSWERS["ours"] += 1
        return PrepareStoreOutput(stored, Told(stored, self.ours._names.whole(stored)), wanted.evicted_keys)

    def complete_load(self, answer, keys, context):
        keys = [key for key in keys if key in self.ours._held]
        self.ours.complete_load(keys, context)
        return answer


class OurWorker(theirs.MockOffloadingWorker):
    def __init__(self, ours):
        super().__init__()
        self.ours = ours

    def complete_jobs(self, job_ids):
        for job in sorted(job_ids & self.waiting_jobs):
            source, target = self.transfer_specs[job]
            if isinstance(target, Told):
                self._moved(job, self.ours.submit_store, source, target, target.names, source, load=False)
            elif isinstance(source, Told):
                self._moved(job, self.ours.submit_load, source, target, source.names, target, load=True)
        super().complete_jobs(job_ids)

    def _moved(self, job, submit, source, target, names, blocks, load):
        before = self._rows(blocks)
        assert submit(job, source, target)
        self.ours.wait({job})
        (result,) = self.ours.get_finished()
        assert (result.job_id, result.success) == (job, True)
        ANSWERS["loads" if load else "stores"] += 1
        for name, was, rows in zip(names, before, self._rows(blocks), strict=True):
            if not load and all(row is not None for row in was):
                CONTENT.setdefault(name, [row.copy() for row in was])
            elif load:
                for row, stored in zip(rows, CONTENT.get(name, []), strict=False):
                    assert row is None or (row == stored).all(), "other bytes than were stored"

    def _rows(self, blocks):
        return [
            [None if row is None else row.numpy().copy() for row in self.ours._rows(group, ids)]
            for group, ids in self.ours._chunks(blocks)
        ]


class OurSpec(theirs.MockOffloadingSpec):
    def __init__(self, config):
        super().__init__(config)
        options = {
            "dir": os.environ["KVSTORED_SUITE_DIR"], "weights_digest": "suite", "timeout_s": 30,
            "wait_pending_s": 60, "model_version": f"{os.getpid()} {next(COUNT)}",
        }  # fmt: skip
        extra = {**config.extra_config, "kvstored": options}
        self.ours = KvstoredOffloadingSpec(replace(config, extra_config=extra))
        self._writers = {}
        Programmed(self, self.manager)
        RUNNING.append(self)

    def get_worker(self, caches):
        self.handler = OurWorker(self.ours.get_worker(caches))
        return self.handler

    @staticmethod
    def worker():
        found = [spec.handler.ours for spec in RUNNING if isinstance(spec.handler, OurWorker)]
        return found[-1] if found else None

    def _names(self, key):
        names = self.ours.get_manager()._names
        whole = names.whole([key])
        return [each_of_rank(whole, rank, names.ranks)[0] for rank in range(names.ranks)]

    def put(self, key):
        if (writer := self._writers.pop(key, None)) is not None:
            writer.abort()
        worker, names = self.worker(), self._names(key)
        group = int.from_bytes(key[-4:], "big")
        refs = worker._caches.group_data_refs[group]
        page = [torch.zeros(ref.page_size_bytes, dtype=torch.int8) for ref in refs] * worker._blocks_per_chunk
        assert all(worker._pages.put(names, worker._formats[group], [page] * len(names)))

    def delete(self, key):
        if (writer := self._writers.pop(key, None)) is not None:
            writer.abort()
        names = self._names(key)
        self.worker()._pages.delete(names)
        CONTENT.pop(self.ours.get_manager()._names.whole([key])[0], None)

    def begin(self, key):
        worker = self.worker()
        group = int.from_bytes(key[-4:], "big")
        self._writers[key] = worker._client.create(self._names(key), worker._formats[group])

    def close(self):
        for writer in self._writers.values():
            writer.abort()
        self.ours.get_manager().shutdown()
        if isinstance(self.handler, OurWorker):
            self.handler.ours.shutdown()


theirs.MockOffloadingSpec = OurSpec


@pytest.fixture(autouse=True)
def _closed():
    yield
    while RUNNING:
        RUNNING.pop().close()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"OURS {dict(ANSWERS)}")
