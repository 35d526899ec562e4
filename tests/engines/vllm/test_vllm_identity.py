"""Goal: engines that differ in one thing that shapes their KV, or names it, never find each other's blocks.

Method: real engines, one after the other in one process, with the connector and with the offloading spec; the
first fills the store. Ranks and adapters have tests of their own (test_vllm.py, test_vllm_keys.py).
"""

import os

import pytest

from tests.engines.conftest import ROOT, run_scene

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.mark.parametrize("way", ["connector", "spec"])
def test_each_dimension_alone_misses(daemon, tiny_model, way):
    kvstored = daemon()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
           "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
    scene = "tests.engines.vllm.vllm_identity_scene"
    run_scene(kvstored, [scene, way, str(kvstored.dir), tiny_model(0), tiny_model(1)], env, 800.0)
