"""Goal: what differs in one thing misses; an adapter's content counts; routers are told hashes and no more; a
gauge says whether the store is there.

Method: the connector's scheduler half with vLLM's own configurations, hashes, events and metrics in a process
of its own, with no engine, which is what makes it cheap.
"""

import os

import pytest

from tests.engines.conftest import ROOT, run_scene

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_keys_events_and_the_gauge(daemon, tiny_model, tmp_path):
    one = daemon()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
           "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    env.pop("PYTHONHASHSEED", None)
    scene = "tests.engines.vllm.vllm_keys_scene"
    run_scene(one, [scene, str(one.dir), tiny_model(0), str(tmp_path)], env, 600.0)
