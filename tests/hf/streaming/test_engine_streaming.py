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
    with pytest.raises(InvalidArgument, match="'meta'"):
        Engine.from_pretrained(tmp_path, client, streaming=streamed, device="meta", **options)
    with pytest.raises(InvalidArgument, match="dtype='float33'"):
        Engine.from_pretrained(tmp_path, client, streaming=streamed, dtype="float33")
