"""Goal: a vLLM whose base classes differ from those the connector was written for is noticed, by name.

Method: the signatures of the installed release beside those recorded in vllm_signatures.json.
"""

import os
import subprocess

import pytest

from tests.engines.conftest import ROOT, python_of
from tests.engines.signatures import differences, printed, recorded

pytestmark = pytest.mark.engines


def test_the_base_classes_are_as_recorded():
    done = subprocess.run(
        [python_of("vllm"), "-m", "tests.engines.record", "vllm"], cwd=ROOT, capture_output=True, text=True,
        check=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    now = printed(done.stdout)
    assert not differences(now, recorded("vllm")), "\n".join(differences(now, recorded("vllm")))
