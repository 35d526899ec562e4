"""Goal: a vLLM whose base classes differ from those the connector was written for is noticed, by name.

Method: the signatures of the installed release beside those recorded in vllm_signatures.json.
"""

import json
import os
import subprocess

import pytest

from tests.engines.conftest import ROOT, python_of
from tests.engines.signatures import differences, recorded

pytestmark = pytest.mark.engines


def test_the_base_classes_are_as_recorded():
    done = subprocess.run(
        [python_of("vllm"), "-m", "tests.engines.record"], cwd=ROOT, capture_output=True, text=True,
        check=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SIGNATURES ")]
    now = json.loads(line.removeprefix("SIGNATURES "))
    assert not differences(now, recorded("vllm")), "\n".join(differences(now, recorded("vllm")))
