"""No model of transformers that kvclient.hf accepts answers otherwise than plain generate() (census.py).

`make test` takes two served models and one with chunks (the kinds have files of their own beside this); all
that build tiny are `slow`. The table of docs/models.md is what a run gives.
"""

from pathlib import Path

import pytest
import torch
import transformers

from kvclient.hf.call import Bypassed, read_prompt
from tests.hf.census import COLUMNS, examine, known_types, tiny, what

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "models.md"
SOME = ("llama", "gemma3", "llama4_text")
KINDS = [pytest.param(kind, marks=[] if kind in SOME else pytest.mark.slow) for kind in known_types()]


def of_the_document() -> dict[str, list[str]]:
    lines = DOCUMENT.read_text().split("<!-- census -->\n")[1].split("\n\n")[0].splitlines()
    if f"transformers {transformers.__version__})" not in lines[0]:
        pytest.skip(f"the table is of another transformers than {transformers.__version__}")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {kind: said for kind, *said in cells}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_accepted_answers_as_plain_generation_does(kind):
    model = tiny(kind)
    if model is None or isinstance(model, str):
        pytest.skip(f"not built: {model}")
    found = examine(model)
    assert "differs" not in found.values()
    said = of_the_document().get(kind)
    assert (said is None) == ("refused" in found), "python -m tests.hf.census prints the table anew"
    if said is not None:
        assert dict(zip(("stored", *COLUMNS), said, strict=True)) == {"stored": what(model), **found}


def test_a_prompt_with_a_picture_goes_without_the_store():
    """What stands for it in the prompt says nothing of what is on it."""
    model, ids = tiny("gemma3"), torch.ones(1, 9, dtype=torch.int64)
    assert read_prompt(model, ids, {"mm_encoder_outputs": {}}).tokens == 9
    for name, value in (("mm_encoder_outputs", {"image": torch.ones(1)}), ("pixel_values", torch.ones(1))):
        with pytest.raises(Bypassed, match=f"model_arguments: {name}"):
            read_prompt(model, ids, {name: value})
