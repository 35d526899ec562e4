"""Goal: the tier beneath vLLM's own host memory gives back the bytes it was given, part of a job where only a
part is there, and an answer to every job whatever becomes of the daemon.

Method: vLLM's factory and its types in a process of its own, over plain memory; no engine.
"""

import os

import pytest

from tests.engines.conftest import ROOT, run_scene

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_bytes_parts_events_and_harm(daemon):
    one = daemon()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    env.pop("PYTHONHASHSEED", None)
    run_scene(one, ["tests.engines.vllm.vllm_tier_scene", str(one.dir)], env, 400.0)
