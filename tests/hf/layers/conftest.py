"""What the tests of kvclient.hf.layers share: which calls a layer computed as one."""

import pytest


@pytest.fixture
def few(monkeypatch):
    """A list, with one entry more for each such call."""
    from kvclient.hf.layers import decoder  # needs transformers, without which the tests are skipped

    usual, seen = decoder.Layer.few, []
    monkeypatch.setattr(decoder.Layer, "few", lambda *args: seen.append(1) or usual(*args))
    return seen
