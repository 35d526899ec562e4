"""Goal: a vLLM whose base classes differ from those the connector was written for is noticed, by name.

Method: the signatures of the installed release beside those recorded in vllm_signatures.json.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.conftest import ROOT, python_of

pytestmark = pytest.mark.engines
RECORDED = Path(__file__).with_name("vllm_signatures.json")


def test_the_base_classes_are_as_recorded():
    done = subprocess.run(
        [python_of("vllm"), "-m", "tests.engines.record"], cwd=ROOT, capture_output=True, text=True,
        check=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SIGNATURES ")]
    now, recorded = json.loads(line.removeprefix("SIGNATURES ")), json.loads(RECORDED.read_text())
    differ = [
        f"{kind}.{name}: recorded {recorded[kind].get(name)!r}, now {now[kind].get(name)!r}"
        for kind in recorded
        for name in sorted({*recorded[kind], *now[kind]})
        if recorded[kind].get(name) != now[kind].get(name)
    ]
    assert not differ, "\n".join(differ)
