"""A pytest plugin for vLLM's own tests of its tiers, run with the engines' Python: our tier in the place of
vLLM's example tier, of its file tier and of the tier that a test of back-pressure brings.
`python -m pytest -p vllm_suite TESTS`, with this folder in PYTHONPATH, and a daemon's directory in
KVSTORED_SUITE_DIR.

vLLM's tests look at the example tier's dictionary and at the file tier's files, and expect a job of the first
to be done at once: all that is given here. "The file of a block is there" is what the store says; a file that
a test cuts short is a byte changed in the daemon's pool.
"""

import contextlib
import importlib.util
import itertools
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import vllm.v1.kv_offload.tiering.example.manager as example
import vllm.v1.kv_offload.tiering.fs.manager as files
from vllm.v1.kv_offload.base import Medium, RequestOffloadingContext

from kvclient.integrations.vllm.offload.tier import KvstoredTier

DIRECTORY = os.environ["KVSTORED_SUITE_DIR"]
COUNT = itertools.count()  # each tier of a test is one of its own, in one daemon
MADE: Counter[str] = Counter()  # in whose place
NOWHERE = "/dev/null/"  # beneath which a test wants to store: there ours looks for its daemon

found = importlib.util.spec_from_file_location("pool_bytes", Path(__file__).parents[2] / "pool_bytes.py")
pool_bytes = importlib.util.module_from_spec(found)
found.loader.exec_module(pool_bytes)


class Chunks:
    """What is in the store, with the face of the example's dictionary."""

    def __init__(self, tier: KvstoredTier) -> None:
        self._tier, self._known = tier, set()

    def _states(self, keys):
        return self._tier._pages.states(self._tier._names.whole(list(keys)))

    def __setitem__(self, key, _value):
        self._known.add(key)
        row = np.zeros(self._tier._rows.shape[1], np.uint8)
        assert self._tier._pages.put(self._tier._names.whole([key]), self._tier._layout_id, [[row]]) == [True]

    def __contains__(self, key):
        return self._states([key])[0] == 2

    def __len__(self):
        return sum(state == 2 for state in self._states(self._known))

    def __iter__(self):
        return (key for key in self._known if key in self)

    def __delitem__(self, key):
        self.pop(key)

    def pop(self, key, default=None):
        self._tier._pages.delete(self._tier._names.whole([key]))
        return default

    def clear(self):
        self._tier._pages.delete(self._tier._names.whole(list(self._known)))


class OurTier(KvstoredTier):
    """In the place of the example."""

    def __init__(
        self, offloading_spec, primary_kv_view, tier_type, custom_param=0, backpressure_detector=None, **more
    ):
        MADE[type(self).__name__] += 1
        if isinstance(primary_kv_view, MagicMock):  # a test of the factory, which moves no bytes
            primary_kv_view = memoryview(np.zeros((2, 16), np.uint8))
        options = {"weights_digest": "suite", "model_version": f"{os.getpid()} {next(COUNT)}", **more}
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector, dir=DIRECTORY, **options
        )
        self.chunks = Chunks(self)

    def submit_store(self, job_metadata):
        assert len(job_metadata.keys) == len(job_metadata.chunk_ids)
        self.chunks._known.update(job_metadata.keys)
        super().submit_store(job_metadata)

    def get_finished_jobs(self):
        KvstoredTier.drain_jobs(self)  # not self's, whose calls a test counts
        return super().get_finished_jobs()

    @property
    def completed_jobs(self):
        KvstoredTier.drain_jobs(self)
        return self._finished

    def get_num_chunks(self):
        KvstoredTier.drain_jobs(self)
        return len(self.chunks)


class OurDelayed(OurTier):
    """In the place of the test's tier that reports what it stored only when it is told to."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self._held_jobs, self._request_policy, self._stores = [], None, set()

    @property
    def blocks(self):
        KvstoredTier.drain_jobs(self)
        return self.chunks

    def get_num_blocks(self):
        return len(self.blocks)

    def submit_store(self, job_metadata):
        self._stores.add(job_metadata.job_id)
        super().submit_store(job_metadata)
        KvstoredTier.drain_jobs(self)  # a test says how long it took

    def get_finished_jobs(self):
        done = list(super().get_finished_jobs())
        self._held_jobs += [job for job in done if job.job_id in self._stores]
        self._finished.extend(job for job in done if job.job_id not in self._stores)
        released, self._finished = list(self._finished), type(self._finished)()
        return released

    def release_jobs(self):
        done = list(super().get_finished_jobs())
        self._finished.extend([*self._held_jobs, *done])
        self._held_jobs.clear()
        self._stores.clear()

    drain_jobs = release_jobs

    def has_pending_work(self):
        return bool(self._held_jobs or self._stores)

    def on_new_request(self, req_context):
        policy = self._request_policy
        return RequestOffloadingContext() if policy is None else RequestOffloadingContext(policy=policy)


class FileOf:
    """A block of the store, with the face of the path of its file."""

    def __init__(self, tier, key):
        self._tier, self._key, self.name = tier, key, tier.root / key.hex()
        self._taken = False  # by a test, which moves it and puts others in its place

    def __add__(self, ending):
        self._taken = True
        return str(self.name) + ending

    def __eq__(self, other):
        return isinstance(other, FileOf) and self._key == other._key

    __hash__ = None

    def __fspath__(self):
        if self._taken:
            return str(self.name)
        cut = self.name.exists() and self.name.stat().st_size > 0
        if self._key not in self._tier.chunks:
            self.name.unlink(missing_ok=True)
        elif not cut:
            self.name.touch()
        return str(self.name)

    def damage(self):
        """If a test has written into the file."""
        if self.name.exists() and self.name.stat().st_size > 0:
            pool_bytes.flip_in_pool(Path(DIRECTORY), self._tier.stored[self._key])
            self.name.unlink()


class OurFiles(KvstoredTier):
    """In the place of the file tier."""

    medium = Medium.STORAGE  # as the file tier says
    _use_o_direct = False

    def __init__(self, offloading_spec, primary_kv_view, tier_type, root_dir, n_read_threads=1,
                 n_write_threads=1, backpressure_detector=None, **more):  # fmt: skip
        MADE[type(self).__name__] += 1
        options = {"weights_digest": "suite", "model_version": root_dir, **more}
        home = root_dir if root_dir.startswith(NOWHERE) else DIRECTORY
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector, dir=home, **options
        )
        self.root, self.chunks, self.stored = Path(root_dir), Chunks(self), {}
        if not self._rows.any():  # so that a block's bytes are found in the pool
            self._rows[:] = np.random.default_rng(next(COUNT)).integers(0, 60, self._rows.shape, np.uint8)
        self.file_mapper = SimpleNamespace(get_file_name=lambda key: FileOf(self, key), base_path="one")
        self._store_job_keys = {}  # of theirs, empty when all jobs are done
        batch = SimpleNamespace(_lookup_batch=[], _pending_results=SimpleNamespace(empty=lambda: False))
        self._lookup_manager = batch  # ours answers at once

    @property
    def events(self):
        return self._events

    def submit_store(self, job_metadata):
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            if chunk < len(self._rows):
                self.stored[key] = self._rows[int(chunk)][:64].tobytes()
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata):
        for key in job_metadata.keys:
            FileOf(self, key).damage()
        super().submit_load(job_metadata)

    def _store(self, job):
        keys, _ = self._buffers(job)
        files.batch_store_block([FileOf(self, key) for key in keys])  # where a test injects its failures
        return super()._store(job)

    def _load(self, job):
        for key in job.keys:
            with contextlib.suppress(FileNotFoundError):
                (self.root / key.hex()).stat()  # as above: a loop of links
        return super()._load(job)

    def shutdown(self):
        super().shutdown()
        threads = SimpleNamespace(_load_q=[], _store_q=[], _threads=list(self._pool._threads))
        self._pool.shutdown(wait=True)
        self._pool = threads
        self.shutdown = lambda: None  # their fixture ends it a second time


files.batch_store_block = lambda paths, *more: None
example.ExampleSecondaryTierManager = OurTier
files.FileSystemTierManager = OurFiles


@pytest.fixture(autouse=True)
def _ours(request):
    if hasattr(request.module, "DelayedSecondaryTierManager"):
        request.module.DelayedSecondaryTierManager = OurDelayed


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"OURS {dict(MADE)}")
