"""What the tests of kvclient.hf over tiny models share: an in-memory store, and the counts of fallbacks."""

import pytest

import kvclient


@pytest.fixture
def client():
    with kvclient.InMemoryClient(64 << 20) as client:
        yield client


@pytest.fixture
def left():
    """Why layers became dense, or calls went to torch, during the test."""
    from kvclient.hf import attention

    before = attention.fallbacks()

    def new() -> dict[str, int]:
        now = attention.fallbacks()
        return {reason: count for reason in now if (count := now[reason] - before.get(reason, 0))}

    return new
