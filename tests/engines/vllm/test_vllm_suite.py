"""Goal: vLLM's own tests of tiers pass with ours where theirs stood.

Method: the tests of vLLM's source distribution, in a process of its own, with
tests/engines/vllm/vllm_suite.py as a plugin: every ExampleSecondaryTierManager that they make is a
KvstoredTier on a real daemon.
"""

import os
import re
import subprocess

import pytest

from tests.engines.conftest import CACHE, ROOT, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
SOURCES = CACHE / "vllm-sdist"
PASSED = 62  # with vLLM's own tier, too


def test_the_tiering_tests_pass_with_our_tier(daemon):
    if not (SOURCES / "tests").exists():
        pytest.skip(f"vLLM's tests are not in {SOURCES}; `make engines` puts them there")
    done = subprocess.run(
        [python_of("vllm"), "-m", "pytest", "-q", "-p", "vllm_suite", "-p", "no:cacheprovider",
         "tests/v1/kv_offload/tiering/test_tiering_offloading.py"],
        cwd=SOURCES, capture_output=True, text=True, timeout=1500,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/engines", "PYTHONHASHSEED": "0",
             "KVSTORED_SUITE_DIR": str(daemon().dir), "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert re.search(rf"^{PASSED} passed", done.stdout, re.MULTILINE), done.stdout[-6000:]
