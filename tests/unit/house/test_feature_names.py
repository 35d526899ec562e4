"""Goal: every name that docs/reuse.md gives to a feature of KVBoost or Cacheflow exists and is described.
Method: look each up, attribute by attribute.
"""

import importlib
import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/reuse.md"


def named() -> list[str]:
    table = DOCUMENT.read_text().split("## What has which name")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    assert all(len(row) == 3 for row in rows)
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row[2])]


@pytest.mark.parametrize("name", named())
def test_it_exists(name):
    pytest.importorskip("transformers")
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        break
    assert found.__doc__, f"{name} is not described"


def test_the_table_is_read():
    assert len(named()) > 30
