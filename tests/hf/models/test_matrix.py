"""The table of architectures in docs/reuse.md is what a run gives."""

from pathlib import Path

import pytest
import transformers

from tests.hf.matrix import rows

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reuse.md"


def test_the_table_of_the_document_is_what_a_run_gives():
    table = DOCUMENT.read_text().split("<!-- matrix -->\n")[1].split("\n\n")[0].splitlines()
    if f"transformers {transformers.__version__})" not in table[0]:
        pytest.skip(f"the table is of another transformers than {transformers.__version__}")
    assert table == rows(), "python -m tests.hf.matrix prints it anew"
