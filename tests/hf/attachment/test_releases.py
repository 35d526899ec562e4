"""The oldest and the newest transformers that are taken, each installed beside the other into build/engines
and run in a process of its own. Marked `engines`: not in `make test`, because it downloads (246 MB a release,
kept for the next run).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# transformers 5.0 refuses newer tokenizers. The newest is the newest that the extra [hf] takes: a release
# that appears between two runs is no change of ours.
RELEASES = {"oldest": ["transformers==5.0.0", "tokenizers<=0.23.0"], "newest": ["transformers==5.24.0"]}
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 600, 1800
TESTS = [
    "tests/hf/models/test_architectures.py",
    "tests/hf/streaming/test_awq.py",
    "tests/hf/attention/test_backends.py",
    "tests/hf/attention/test_in_place.py",
    "tests/hf/attention/test_in_place_default.py",
    "tests/hf/attention/test_paged.py",
    "tests/hf/attention/test_decode_graph.py",
    "tests/hf/engine/test_generate.py",
    "tests/hf/reuse/test_inside.py",
    "tests/hf/reuse/test_chunkers.py",
    "tests/hf/attachment/test_modes.py",
    "tests/hf/models/test_windows.py",
    "tests/hf/models/test_latent.py",
    "tests/hf/models/test_layer_groups.py",
    "tests/hf/models/test_recurrent.py",
    "tests/hf/layers/test_decoder.py",
    "tests/hf/layers/test_layers.py",
    "tests/hf/layers/test_strangers.py",
    "tests/hf/layers/test_watched.py",
]


@pytest.fixture(params=RELEASES)
def release(request) -> Path:
    """The directory with that release in it."""
    target = ROOT / "build" / "engines" / request.param
    done = target / ".complete"
    if not done.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(target)]
        subprocess.run([*command, *RELEASES[request.param]], check=True, timeout=INSTALL_TIMEOUT_S)
        done.touch()
    return target


@pytest.mark.engines
@pytest.mark.timeout(INSTALL_TIMEOUT_S + RUN_TIMEOUT_S)
def test_release(release):
    environment = {**os.environ, "PYTHONPATH": str(release), "OMP_NUM_THREADS": "1"}
    check = "import transformers; print(transformers.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(release)), f"the tests would run with {where.stdout.strip()}"
    every = ["-p", "no:tests.matrix_part"]  # every architecture in every test
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *every, *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
