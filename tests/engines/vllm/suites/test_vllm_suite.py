"""Goal: vLLM's own tests of its tiers, of its connectors and of its OffloadingConnector pass with ours where
theirs stood.

Method: the tests of vLLM's source distribution, in a process of its own, with a plugin. vllm_suite.py: every
example tier and every file tier that they make is a KvstoredTier on a real daemon. vllm_connector_suite.py
and vllm_spec_suite.py: what a test programs the connector, or their manager, to say becomes the state of a
real daemon, and ours must say it; their worker's transfers are ours.
"""

import os
import re
import subprocess

import pytest

from tests.engines.conftest import CACHE, ROOT, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
SOURCES = CACHE / "vllm-sdist"
TIERING = "tests/v1/kv_offload/tiering/test_{}.py"
TIERS = [TIERING.format(name) for name in ("tiering_offloading", "fs_tier", "factory", "backpressure")]
UNITS = [
    f"tests/v1/kv_connector/unit/test_{name}"
    for name in (
        "kv_load_failure_recovery.py", "invalid_blocks_correctness.py", "error_propagation.py",
        "cache_pollution_prevention.py", "kv_connector_lifecycle.py", "hma_auto_config.py",
        "multi_connector.py::test_multi_connector_handle_preemptions_integration",
    )
]  # fmt: skip
SPEC = 563  # that pass with vLLM's own, too

OPT = """
import sys
from tokenizers import Tokenizer, models
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast
words = {f"w{i}": i for i in range(500)} | {"</s>": 500, "<unk>": 501}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
special = dict(eos_token="</s>", unk_token="<unk>", bos_token="</s>")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(sys.argv[1])
OPTForCausalLM(OPTConfig(
    hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
    max_position_embeddings=10000, word_embed_proj_dim=64)).save_pretrained(sys.argv[1])
"""  # in the place of facebook/opt-125m, which their tests would download


def run(daemon, plugin, tests, **environment):
    """What pytest said."""
    if not (SOURCES / "tests").exists():
        pytest.skip(f"vLLM's tests are not in {SOURCES}; `make engines` puts them there")
    done = subprocess.run(
        [python_of("vllm"), "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", *tests],
        cwd=SOURCES, capture_output=True, text=True, timeout=3000,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/engines/vllm/suites", "PYTHONHASHSEED": "0",
             "KVSTORED_SUITE_DIR": str(daemon().dir), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    home = tmp_path_factory.mktemp("opt")
    subprocess.run([python_of("vllm"), "-c", OPT, home], check=True, capture_output=True, timeout=600)
    return str(home)


def test_the_tests_of_tiers_pass_with_our_tier(daemon):
    said = run(lambda: daemon(memory="384MiB"), "vllm_suite", TIERS)
    assert re.search(r"^162 passed", said, re.MULTILINE), said[-6000:]
    assert "failed" not in said


def test_the_tests_of_connectors_pass_with_our_connector(daemon, model):
    said = run(daemon, "vllm_connector_suite", UNITS, KVSTORED_SUITE_MODEL=model)
    assert re.search(r"^(\d+) passed", said, re.MULTILINE), said[-6000:]
    assert "failed" not in said
    answers = re.search(r"^OURS {.*'found': (\d+)", said, re.MULTILINE)
    assert answers and int(answers[1]) > 30, "our scheduler's half was hardly asked"


def test_the_tests_of_the_offloading_connector_pass_with_our_spec(daemon, model):
    tests = ["tests/v1/kv_connector/unit/offloading_connector"]
    said = run(daemon, "vllm_spec_suite", tests, KVSTORED_SUITE_MODEL=model)
    assert re.search(rf"^{SPEC} passed", said, re.MULTILINE), said[-6000:]
    answers = re.search(r"^OURS {.*'ours': (\d+)", said, re.MULTILINE)
    assert answers and int(answers[1]) > 300, "our manager was hardly asked"
