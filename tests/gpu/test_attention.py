"""Proves that attention on a GPU is what its emulation is: the same cases against the same oracle in double.

Method: the tests of tests/kernels/cuda/test_cuda_attention.py, collected here once more, whose cases now
run on the device, every kernel of them. Those that look at host memory stay there.
"""

import functools

import pytest

from tests.gpu import attending
from tests.kernels.cuda import emulated
from tests.kernels.cuda import test_cuda_attention as cases

path, any_path = cases.path, cases.any_path  # fixtures
HOST_ONLY = {
    "test_what_the_fast_kernels_have_not_goes_to_the_naive_one",
    "test_one_block_under_two_turns",
    "test_memory_of_any_alignment",
    "test_a_table_stands_for_the_sequences_and_its_tail_grows",
    "test_what_is_wrong_is_said",
}
globals().update(
    {name: test for name, test in vars(cases).items() if name.startswith("test_") and name not in HOST_ONLY}
)


@pytest.fixture(autouse=True)
def on_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(emulated, "run", functools.partial(attending.run, device=gpu))
