"""Proves that the host gets as many layers as make a pass end first, and none that it cannot compute.

Method: costs that are given, beside all other numbers of layers.
"""

import pytest

from kvclient.hf.streaming.device.shares import MOST_ROWS, Shares


def test_a_pass_ends_first_as_it_is_shared():
    moved = dict.fromkeys(range(0, 40, 2), 1000)  # 20 of 40 layers lie in the host's memory
    for host_s in (0.01, 0.1, 0.5, 0.9, 1.5, 3.0, 100.0):
        shares = Shares(1000.0, {1: 0.05}, {1: host_s}, layers=40)
        passes = [max((20 - b) * 1.0, b * host_s + (40 - b) * 0.05) for b in range(21)]
        chosen = shares.on_host(moved, 1, 20)
        assert shares.pass_s(moved, 1, chosen) == pytest.approx(min(passes))
        assert shares.on_host(moved, 1, 3) <= 3
    assert Shares(1000.0, {1: 0.05}, {1: 0.5}, layers=40).on_host(moved, 1, 20) == 13
    assert Shares(1000.0, {1: 0.05}, None, layers=40).on_host(moved, 1, 20) == 0


def test_layers_of_the_host_lie_between_those_that_are_brought():
    moved = dict.fromkeys(range(12), 1000)
    shares = Shares(1000.0, {1: 0.05, 16: 0.05}, {1: 1.0, 16: 50.0}, layers=12, able=tuple(range(1, 12, 2)))
    found = shares.choose(moved, 2, 1)
    assert [n for n, where in found.items() if where == "host"] == list(range(1, 12, 2))
    assert set(shares.choose(moved, 2, 16).values()) == {"device"}  # as it takes too long
    assert set(shares.choose(moved, 2, MOST_ROWS + 1).values()) == {"device"}  # as nobody has measured it
    some = Shares(1000.0, {1: 0.05}, {1: 5.0}, layers=12, able=tuple(range(12))).choose(moved, 2, 1)
    assert [n for n, where in some.items() if where == "host"] == [5, 11]
