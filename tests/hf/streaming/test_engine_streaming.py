"""Goal: an Engine whose layers are read from the disk says and shares what one in memory does.

Method: the tiny model with a tokenizer of one byte a token, both engines on one store, real files."""

import pytest

from kvclient.errors import InvalidArgument
from kvclient.hf import Engine
from kvclient.hf.streaming import StreamingConfig

BLOCK = 16
DOCUMENT = "Rivers carry stones from the mountains down to the sea, and grind them on the way to sand. " * 2


def test_it_says_the_same_and_finds_what_the_other_published(home, client, tmp_path):
    """The whole of it in one line; a device that the layers do not come to is refused by name."""
    for file in home.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())  # what is rearranged lies beside them
    streamed = StreamingConfig(residency="full_stream")
    options = {"dtype": "float32", "block_tokens": BLOCK, "self_test": False}
    with Engine.from_pretrained(home, client, **options) as engine:
        wanted = engine.generate(DOCUMENT, 8)
    with Engine.from_pretrained(tmp_path, client, streaming=streamed, **options) as other:
        found = other.generate(DOCUMENT, 8)
        assert found.text == wanted.text
        assert found.report.reused_tokens == (len(DOCUMENT) - 1) // BLOCK * BLOCK
    with pytest.raises(InvalidArgument, match=r"device='meta' of a streamed model; it computes on 'cpu'"):
        Engine.from_pretrained(tmp_path, client, streaming=streamed, device="meta", **options)
    with pytest.raises(InvalidArgument, match="dtype='float33'"):
        Engine.from_pretrained(tmp_path, client, streaming=streamed, dtype="float33")


def test_the_device_is_the_configurations_and_a_hub_id_says_what_to_do(home, client, tmp_path, monkeypatch):
    """It refused "auto", whatever torch has; a hub id without a network ended in transformers' OSError."""
    for file in home.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    streamed = StreamingConfig(residency="full_stream")
    options = {"dtype": "float32", "block_tokens": BLOCK, "self_test": False, "streaming": streamed}
    for device in ("auto", "cpu"):
        with Engine.from_pretrained(tmp_path, client, device=device, **options) as engine:
            assert engine.model.device.type == "cpu"
    with pytest.raises(InvalidArgument, match=r"gguf_file='m\.gguf'; streaming takes a directory"):
        Engine.from_pretrained(tmp_path / "m.gguf", client, **options)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InvalidArgument, match=r"fetched first.*hf download some/model"):
        Engine.from_pretrained("some/model", client, **options)
