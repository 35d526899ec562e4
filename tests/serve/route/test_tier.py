"""Goal: what is said of an answer's origin is where its tokens came from, the farthest place of several.

Method: the pure rule, on what Run.reuse() gives.
"""

import pytest

from kvclient.serve.http.answers.run import farthest_tier


@pytest.mark.parametrize(
    "tokens, tier",
    [
        ({}, "none"),
        ({"memory_tokens": 0, "disk_tokens": 0, "peer_tokens": 0}, "none"),
        ({"memory_tokens": 128, "disk_tokens": 0, "peer_tokens": 0}, "memory"),
        ({"memory_tokens": 128, "disk_tokens": 256, "peer_tokens": 0}, "disk"),
        ({"memory_tokens": 128, "disk_tokens": 256, "peer_tokens": 128}, "peer"),
        ({"memory_tokens": 0, "disk_tokens": 0, "peer_tokens": 128}, "peer"),
    ],
)
def test_the_farthest_place_is_named(tokens, tier):
    assert farthest_tier(tokens) == tier
