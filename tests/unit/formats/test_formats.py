"""Goal: docs/formats.md says what is in memory.

Method: the tables behind `<!-- struct X -->` are compared, field by field, with the offsets and sizes that
the compiler gave (build/dev/formats_test prints them), the layout blob's table with the packer of kvclient.
"""

import re
import struct
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/formats.md").read_text()


def documented(name: str) -> list[tuple[str, int, int]]:
    table = TEXT.split(f"<!-- struct {name} -->")[1].split("\n\n")[0]
    return [
        (field, int(offset), int(size))
        for offset, size, field in re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", table, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[tuple[str, int, int]]]:
    program = ROOT / "build/dev/formats_test"
    assert program.exists(), "run `make native-tests` first"
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    structs: dict[str, list[tuple[str, int, int]]] = {}
    for line in printed.splitlines():
        name, field, offset, size = line.split()
        structs.setdefault(name, []).append((field, int(offset), int(size)))
    return structs


@pytest.mark.parametrize("name", re.findall(r"<!-- struct (\w+) -->", TEXT))
def test_struct_table(name: str, compiled: dict[str, list[tuple[str, int, int]]]):
    assert documented(name) == compiled[name]


def test_every_struct_has_its_table(compiled: dict[str, list[tuple[str, int, int]]]):
    assert set(re.findall(r"<!-- struct (\w+) -->", TEXT)) == set(compiled)


def words(enum: str, header: str) -> list[str]:
    """The values of an enumeration of the native headers, in words: RegisterLayout is "register layout"."""
    text = next((ROOT / "native/core").rglob(header)).read_text()
    body = re.search(rf"enum class {enum}[^{{]*\{{(.*?)\}}", text, re.DOTALL)
    assert body
    names = re.findall(r"\b([A-Z]\w*)(?: = \d+)?,", body[1])
    return [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() for name in names]


def constant(name: str, header: str) -> int:
    found = re.search(rf"\b{name} = (\d+);", next((ROOT / "native/core").rglob(header)).read_text())
    assert found, name
    return int(found[1])


def test_versions_operations_and_errors_are_those_of_the_headers():
    assert f"| version | {constant('kFormatVersion', 'block.h')} (`kFormatVersion`)" in TEXT
    assert f"| version | protocol version, {constant('kVersion', 'protocol.h')} |" in TEXT
    one_line = " ".join(TEXT.split())
    operations = ", ".join(f"{i} {word}" for i, word in enumerate(words("Op", "protocol.h"), 1))
    assert "1 attach, 2 register layout" in operations
    assert f"| {operations} |" in one_line
    errors = ", ".join(f"{i} {word}" for i, word in enumerate(words("Code", "error.h")))
    assert f"Error codes: {errors}." in one_line
    states = ", ".join(f"{i} {word.upper()}" for i, word in enumerate(words("State", "block.h")))
    assert f"States: {states}." in one_line


def test_the_protobufs_name_the_same_limits():
    store = " ".join((ROOT / "proto/kvstored/v1/store.proto").read_text().replace("//", "").split())
    assert f"more layouts than the table holds ({constant('kMaxLayouts', 'block.h')})" in store


def test_layout_blob_table():
    from kvclient.blocks.layout import Layout

    blob = bytes(Layout(3, 5, 7, "float16", 11, kv_per_layer=1, meta_fixed=13, meta_per_token=17, name="n"))
    table = TEXT.split("## 3.")[1].split("## 4.")[0]
    fields = re.findall(r"^\| (\d+) \| 4 \| (\w+) \|", table, re.MULTILINE)
    values = {name: struct.unpack_from("<I", blob, int(at))[0] for at, name in fields if name != "magic"}
    assert values == {
        "num_layers": 3, "kv_per_layer": 1, "num_kv_heads": 5, "head_dim": 7, "dtype": 1, "block_tokens": 11,
        "codec": 0, "meta_fixed": 13, "meta_per_token": 17,
    }  # fmt: skip
    assert blob[:4] == b"KVL1"
    assert struct.unpack_from("<3I", blob, 40) == (70, 70, 70)
    assert blob[52:] == b"n"
