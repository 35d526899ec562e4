"""Goal: docs/formats.md says what is in memory.

Method: the tables behind `<!-- struct X -->` are compared, field by field, with the offsets and sizes that
the compiler gave (build/dev/formats_test prints them), the layout blob's table with the packer of kvclient.
"""

import re
import struct
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    assert program.exists(), "run `make build` first"
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
