"""Goal: a block's file on disk has the bytes that docs/formats.md promises, in every version.

Method: the golden file against tests/golden/reference_block_file.py (struct and a table-driven CRC), against
the native code's check of it, and against the digest of what that writes (native/tests/block_file_test.cc).
"""

import re
import struct
from hashlib import sha256
from pathlib import Path

import pytest

from kvclient.blocks.layout import Layout
from kvstored import _core
from tests.golden import reference_block_file as reference

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = reference.GOLDEN.read_bytes()


def checked(directory: Path) -> dict:
    return _core.fsck(
        str(directory), repair=False, keep_corrupt=False, layers=True,
        finding=lambda *_: None, progress=lambda *_: None,
    )  # fmt: skip


def test_the_golden_file_is_what_the_reference_writes():
    assert reference.block()[1] == GOLDEN


def test_the_golden_file_is_what_the_native_code_writes():
    assert sha256(GOLDEN).hexdigest() in (ROOT / "native/tests/block_file_test.cc").read_text()


def test_the_reference_reads_the_golden_file():
    fields, layers = reference.read(GOLDEN)
    assert fields["key"] == sha256(b"key 1").digest()
    assert (fields["tokens"], fields["layers"], fields["priority"]) == (5, 3, 35)
    assert [len(layer) for layer in layers] == [240, 480, 240]
    assert layers[1][:3] == bytes((32, 33, 34))


def test_the_native_check_agrees(tmp_path):
    for tokens in (1, 5, 16):
        key, file = reference.block(tokens, tokens, (48, 96, 48, 7))
        (tmp_path / f"{key.hex()}.kv").write_bytes(file)
    report = checked(tmp_path)
    assert (report["files"], report["wrong"]) == (3, 0)
    (tmp_path / f"{key.hex()}.kv").write_bytes(file[:-1] + b"\x01")
    assert checked(tmp_path)["wrong"] == 1


def test_the_documented_offsets_are_the_references():
    """test_formats.py compares the table with the compiler, this the reference's struct with the table."""
    table = (ROOT / "docs/formats.md").read_text().split("<!-- struct FileHeader -->")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", table, re.MULTILINE)
    assert [name for _, _, name in rows[: len(reference.FIELDS)]] == list(reference.FIELDS)
    assert int(rows[len(reference.FIELDS)][0]) == reference.HEAD.size
    at = 0
    codes = reference.HEAD.format[1:].replace("32s", "k").replace("8s", "m")
    for (offset, size, _), code in zip(rows[: len(codes)], codes, strict=True):
        assert (int(offset), int(size)) == (at, {"k": 32, "m": 8, "I": 4, "Q": 8}[code])
        at += int(size)


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_the_extent_is_that_of_the_layout(tokens):
    """The file's data has the arrangement that kvclient writes in memory."""
    layout = Layout(3, 2, 4, "float32", 16, kv_per_layer=2, meta_fixed=80, meta_per_token=4)
    sizes = struct.unpack_from("<3I", bytes(layout), 40)
    fields, layers = reference.read(reference.block(1, tokens, sizes)[1])
    assert fields["data_bytes"] % 4096 == 0
    assert [len(layer) for layer in layers] == [size * tokens for size in sizes]
