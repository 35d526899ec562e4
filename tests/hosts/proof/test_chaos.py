"""Three hosts whose daemons are killed, frozen and cut off from each other while clients of all put, get,
follow and delete: no byte is wrong, none leaks, and all come back. tests/soak/hosts.py is the method.
"""

import pytest

from tests.soak.hosts import soak


def test_a_few_rounds_of_chaos():
    assert soak(seed=5, rounds=3, minutes=0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_rounds_of_chaos(seed):
    assert soak(seed, rounds=25, minutes=0) == 0
