"""A tiny random model with a store, and a directory of calibrations that is the test's alone."""

import pytest

import kvclient.hf
from tests.hf.zoo import build


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCLIENT_CALIBRATION_DIR", str(tmp_path / "calibration"))
    return tmp_path / "calibration"


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def kv(model, client):
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
        yield kv
