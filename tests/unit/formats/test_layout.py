"""Goal: Layout says what lies where in a block, refuses what the daemon would refuse, and agrees with the
native parser. Method: the arithmetic against a second, naive computation over generated layouts; the blob
byte by byte; the bounds of native/core/format/layout.cc read from its source.
"""

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument, Layout
from kvclient.blocks import layout as geometry_module
from kvclient.blocks.layout import Geometry

ROOT = Path(__file__).resolve().parents[3]

layouts = st.builds(
    Layout,
    num_layers=st.integers(1, 40),
    num_kv_heads=st.integers(1, 9),
    head_dim=st.integers(1, 130),
    dtype=st.sampled_from(["uint8", "float16", "bfloat16", "float32", "int8"]),
    block_tokens=st.integers(1, 300),
    kv_per_layer=st.integers(1, 2),
    meta_fixed=st.integers(0, 200),
    meta_per_token=st.integers(0, 20),
    name=st.text(max_size=20),
)


@given(layouts, st.data())
def test_offsets_are_the_running_sum_of_padded_parts(layout, data):
    tokens = data.draw(st.integers(1, layout.block_tokens))
    element = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}[layout.dtype]
    at = 0
    for layer in range(layout.num_layers):
        assert layout.layer_offset(layer, tokens) == at and at % 512 == 0
        length = layout.kv_per_layer * layout.num_kv_heads * tokens * layout.head_dim * element
        assert layout.layer_length(layer, tokens) == length
        at += length + -length % 512
    checksums = 4 * layout.num_layers
    meta = at + checksums + -checksums % 512
    assert layout.geometry.meta_offset(tokens) == meta
    assert layout.meta_bytes(tokens) == layout.meta_fixed + tokens * layout.meta_per_token
    end = meta + layout.meta_bytes(tokens)
    assert layout.block_bytes(tokens) == end + -end % 4096


@given(layouts)
def test_a_blob_tells_the_layout(layout):
    assert Layout.from_blob(bytes(layout)) == layout
    assert bytes(Layout.from_blob(bytes(layout))) == bytes(layout)


def test_a_name_may_be_any_bytes():
    """Another client registered it: reading it must not fail, and must give the same bytes back."""
    blob = bytes(Layout(1, 1, 1, "uint8", 1, name="x"))[:-1] + bytes(range(256))
    assert bytes(Layout.from_blob(blob)) == blob


def test_the_blob_byte_by_byte():
    layout = Layout(num_layers=2, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=128, name="x")
    words = struct.pack("<9I", 2, 2, 3, 64, 2, 128, 0, 80, 12) + struct.pack("<2I", 768, 768)
    assert bytes(layout) == b"KVL1" + words + b"x"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_layout_or_a_typed_error(blob):
    for candidate in (blob, b"KVL1" + blob):
        try:
            Geometry.from_blob(candidate)
        except InvalidArgument:
            pass


def test_layers_may_differ_in_size():
    layout = Layout(3, 2, 8, "uint8", 16, layer_bytes_per_token=[32, 100, 32])
    assert [layout.layer_offset(i) for i in range(3)] == [0, 512, 512 + 2048]
    assert Layout.from_blob(bytes(layout)) == layout
    shapes = [layout.geometry.layer_shape(layer, 16) for layer in range(3)]
    assert shapes == [(2, 2, 16, 8), (1600,), (2, 2, 16, 8)], "of another width it is bytes"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_layers": 513}, "1..512"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_kv_heads": 2.0}, "num_kv_heads=2.0"),
        ({"head_dim": 65_537}, "1..65536"),
        ({"dtype": "fp8"}, "bfloat16"),
        ({"block_tokens": 65_536}, "1..65535"),
        ({"block_tokens": True}, "block_tokens=True"),
        ({"kv_per_layer": 3}, "1..2"),
        ({"meta_fixed": -1}, "meta_fixed=-1"),
        ({"meta_per_token": 4097}, "0..4096"),
        ({"layer_bytes_per_token": [1]}, "1 layer sizes for num_layers=2"),
        ({"layer_bytes_per_token": [1, 1 << 25]}, "layer_bytes_per_token"),
        ({"layer_bytes_per_token": 5}, "one size for each layer"),
        ({"name": "n" * 257}, "0..256"),
        ({"name": b"n"}, "must be a str"),
        ({"head_dim": 60_000, "num_kv_heads": 60, "dtype": "float32"}, "16777216"),
    ],
)
def test_errors_name_the_value_and_the_limit(wrong, says):
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        Layout(**{"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, **wrong})


def test_the_bounds_are_those_of_the_native_parser():
    shapes = ROOT / "native/core/format"
    source = (shapes / "layout.cc").read_text() + (shapes / "block.h").read_text()

    def bound(field: str) -> str:
        return re.search(rf'bound\("{field}", layout\.\w+, \w+, ([^)]+)\)', source)[1]

    assert bound("block_tokens") == str(geometry_module.MAX_BLOCK_TOKENS)
    assert bound("num_kv_heads") == str(geometry_module.MAX_KV_HEADS)
    assert bound("head_dim") == str(geometry_module.MAX_HEAD_DIM)
    assert bound("meta_fixed") == "1u << 20" and geometry_module.MAX_META_FIXED == 1 << 20
    assert bound("meta_per_token") == str(geometry_module.MAX_META_PER_TOKEN)
    assert f"kMaxLayers = {geometry_module.MAX_LAYERS};" in source
    assert "kMaxLayerBytesPerToken = 1u << 24" in source
    assert geometry_module.MAX_LAYER_BYTES_PER_TOKEN == 1 << 24
