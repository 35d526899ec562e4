"""Goal: a vLLM whose base classes differ from those the connector was written for is noticed, by name.

Method: the signatures of the installed release, and the attributes of what is called from outside, beside
those recorded in vllm_signatures.json.
"""

import os
import subprocess

import pytest

from tests.engines.conftest import ROOT, python_of
from tests.engines.signatures import called, differences, printed, recorded


def test_an_attribute_is_there_if_it_is_set():
    class Kind:
        def __init__(self, other):
            self.set, (self.unpacked, self.annotated) = 1, (2, 3)
            self.annotated: int = self.method(self.read) + other.elsewhere
            other.of_another = self.read

        def method(self, value):
            return value

    names = ["set", "unpacked", "annotated", "read", "elsewhere", "of_another", "method", "nowhere"]
    assert called(Kind, names) == {
        "set": "attribute", "unpacked": "attribute", "annotated": "attribute", "method": "self, value",
    }  # fmt: skip


@pytest.mark.engines
def test_the_base_classes_are_as_recorded():
    done = subprocess.run(
        [python_of("vllm"), "-m", "tests.engines.record", "vllm"], cwd=ROOT, capture_output=True, text=True,
        check=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    now = printed(done.stdout)
    assert not differences(now, recorded("vllm")), "\n".join(differences(now, recorded("vllm")))
