"""Goal: engines that differ in one thing that shapes their KV, or names it, never find each other's blocks.

Method: real engines, one after the other in one process, with the connector and with the offloading spec; the
first fills the store. Ranks and adapters have tests of their own (test_vllm.py, test_vllm_keys.py).
"""

import pytest

from tests.engines.conftest import run_scene
from tests.engines.vllm import small_kv

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.mark.parametrize("way", ["connector", "spec"])
def test_each_dimension_alone_misses(daemon, tiny_model, way):
    kvstored = daemon()
    scene = "tests.engines.vllm.vllm_identity_scene"
    run_scene(kvstored, [scene, way, str(kvstored.dir), tiny_model(0), tiny_model(1)], 800.0)
    if not small_kv.there():
        pytest.skip(f"all but the KV's type missed as they should; {small_kv.WHY}")
