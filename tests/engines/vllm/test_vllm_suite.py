"""Goal: vLLM's own tests of its tiers and of its OffloadingConnector pass with ours where theirs stood.

Method: the tests of vLLM's source distribution, in a process of its own, with a plugin. vllm_suite.py: every
ExampleSecondaryTierManager that they make is a KvstoredTier on a real daemon. vllm_spec_suite.py: what a test
programs their manager to say becomes the state of a real daemon, and our manager must say it; their worker's
transfers are ours.
"""

import os
import re
import subprocess

import pytest

from tests.engines.conftest import CACHE, ROOT, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
SOURCES = CACHE / "vllm-sdist"
TIERS = 62  # that pass with vLLM's own tier, too
CONNECTOR = 563  # with vLLM's own spec, too

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
        [python_of("vllm"), "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", tests],
        cwd=SOURCES, capture_output=True, text=True, timeout=3000,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/engines/vllm", "PYTHONHASHSEED": "0",
             "KVSTORED_SUITE_DIR": str(daemon().dir), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return done.stdout


def test_the_tiering_tests_pass_with_our_tier(daemon):
    said = run(daemon, "vllm_suite", "tests/v1/kv_offload/tiering/test_tiering_offloading.py")
    assert re.search(rf"^{TIERS} passed", said, re.MULTILINE), said[-6000:]


def test_the_connectors_tests_pass_with_our_spec(daemon, tmp_path):
    made = [python_of("vllm"), "-c", OPT, tmp_path]
    subprocess.run(made, check=True, capture_output=True, timeout=600)
    tests = "tests/v1/kv_connector/unit/offloading_connector"
    said = run(daemon, "vllm_spec_suite", tests, KVSTORED_SUITE_MODEL=str(tmp_path))
    assert re.search(rf"^{CONNECTOR} passed", said, re.MULTILINE), said[-6000:]
    answers = re.search(r"^OURS {.*'ours': (\d+)", said, re.MULTILINE)
    assert answers and int(answers[1]) > 300, "our manager was hardly asked"
