"""Goal: docs/proof.md names only tests that exist, every row names one, and what `make test` leaves out is
called slow. Method: each name is looked up in its file, each `make` target in the Makefile; the numbers of
the invariants and of the other stores' cases are counted.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/proof.md").read_text()
SLOW = " *(slow)*"


def rows() -> list[tuple[str, list[str]]]:
    """Of each row what is proved and the names in its last column, the file written out, SLOW kept."""
    found = []
    for line in re.findall(r"^\|(.*)\|$", TEXT, re.MULTILINE):
        *what, proofs = [cell.strip() for cell in line.split("|")]
        if proofs == "proved by" or set(proofs) == {"-"}:
            continue
        names, file = [], ""
        for name, slow in re.findall(r"`([^`]+)`( \*\(slow\)\*)?", proofs):
            file = name.partition("::")[0] or file
            names.append((file + name if name.startswith("::") else name) + slow)
        found.append((" ".join(what), names))
    return found


def path_of(file: str) -> Path:
    """Where the document's names begin."""
    if file.endswith(".cc"):
        return ROOT / "native/tests" / file
    return ROOT / file if file.startswith("kvclient/") else ROOT / "tests" / file


@functools.cache
def there(file: str) -> dict[str, str]:
    """The tests of a file, with SLOW or nothing."""
    path = path_of(file)
    if not path.is_file():
        return {}
    if path.suffix == ".cc":
        return dict.fromkeys(re.findall(r"^TEST\((\w+)\)", path.read_text(), re.MULTILINE), "")
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            marks = map(ast.unparse, node.decorator_list)
            found[node.name] = SLOW if "pytest.mark.slow" in marks else ""
        elif isinstance(node, ast.Assign):  # TestStore = Machine.TestCase
            found |= {target.id: "" for target in node.targets if isinstance(target, ast.Name)}
    return {name: slow for name, slow in found.items() if name.lower().startswith("test")}


def is_true(name: str) -> bool:
    if name.startswith("make "):
        return re.search(rf"^{name[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    file, _, test = name.removesuffix(SLOW).partition("::")
    return there(file).get(test) == (SLOW if name.endswith(SLOW) else "")


def test_every_row_has_a_proof_that_exists():
    assert len(rows()) > 80
    wrong = [f"no test: {what}" for what, names in rows() if not any("::" in name for name in names)]
    wrong += [name for _, names in rows() for name in names if not is_true(name)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("section", "numbers"), [("The invariants", 11), ("What other stores", 24)])
def test_every_number_has_its_row(section: str, numbers: int):
    text = TEXT.split(f"\n## {section}")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(1 + number) for number in range(numbers)]


def test_what_is_not_so_is_noticed():
    good = "fault/deaths/test_client_deaths.py::test_clients_die_under_load"
    assert is_true(good) and is_true(f"{good}_for_long{SLOW}") and is_true("make soak")
    for bad in (f"{good}{SLOW}", f"{good}_for_long", f"{good}s", f"x{good}", "pins_test.cc::x", "make gold"):
        assert not is_true(bad), bad
