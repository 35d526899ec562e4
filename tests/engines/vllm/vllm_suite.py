"""A pytest plugin for vLLM's own tests, run with the engines' Python: our tier in the place of vLLM's example
tier. `python -m pytest -p vllm_suite TESTS`, with this folder in PYTHONPATH, and a daemon's directory in
KVSTORED_SUITE_DIR.

vLLM's tests look at the example tier's dictionary and expect jobs to be done at once: both are given here.
"""

import itertools
import os

import numpy as np
import vllm.v1.kv_offload.tiering.example.manager as example

from kvclient.integrations.vllm.tier import KvstoredTier

COUNT = itertools.count()  # each tier of a test is one of its own, in one daemon


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
    def __init__(
        self, offloading_spec, primary_kv_view, tier_type, custom_param=0, backpressure_detector=None
    ):
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector,
            dir=os.environ["KVSTORED_SUITE_DIR"], weights_digest="suite",
            model_version=f"{os.getpid()} {next(COUNT)}",
        )  # fmt: skip
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


example.ExampleSecondaryTierManager = OurTier
