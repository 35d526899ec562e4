"""Goal: the documents name only what exists, and the generated picture is current.

Method: every path, `make` target, `file:function` reference and relative link in README and docs is looked up
in the tree; the picture of the block states is drawn again from kvstored._core and compared.
"""

import ast
import importlib.util
import re
import subprocess
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = "kvstored|kvclient|native|tests|docs|bench|examples|proto|deploy"
MADE = {"build", "bench/out", "kvclient/kernels/_cuda.so"}  # by make


def names(document: Path) -> list[str]:
    """What stands in back quotes, code blocks left out."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document: Path):
    missing = []
    for quoted in names(document):
        if not re.fullmatch(rf"(?:{TOP})/[\w./*-]*", quoted) or any(quoted.startswith(made) for made in MADE):
            continue
        path, _, _ = quoted.partition(":")
        if not list(ROOT.glob(path.rstrip("/"))):
            missing.append(quoted)
    assert not missing, f"{document.name} names what does not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{document.name} links to what does not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = set(re.findall(r"(?:`|^|\$ )make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert wanted <= targets, f"{document.name}: no such target: {sorted(wanted - targets)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_use_public_names(document: Path):
    import kvclient

    public = {*kvclient.__all__, *(path.name for path in (ROOT / "kvclient").iterdir() if path.is_dir())}
    for code in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        used = re.findall(r"\bkvclient\.(\w+)", code)
        ast.parse(code)
        assert set(used) <= public, f"{document.name}: {set(used) - public} in\n{code}"


def test_the_tour_names_what_exists():
    """Every `path:name` of the tour is a function, method, type or message defined in that file."""
    reference_form = re.compile(r"[\w./-]+\.\w+:[\w:~.]+")
    references = [name for name in names(ROOT / "docs/tour.md") if reference_form.fullmatch(name)]
    assert len(references) >= 12, "the tour names functions as `file:function`"
    missing = []
    for reference in references:
        path, _, symbol = reference.partition(":")
        last = re.escape(symbol.split(".")[-1])
        if path.endswith(".py"):
            definition = rf"^\s*(?:async )?(?:def|class) {last}\b"
        elif path.endswith(".cc"):
            definition = rf"^\S[^;=]*\b{last}\("  # from the first column on: a definition, not a call
        else:
            definition = rf"^\s*(?:struct|class|enum class) {last}\b|^\S[^;=]*\b{last}\("
        source = ROOT / path
        if not source.is_file() or not re.search(definition, source.read_text(), re.MULTILINE):
            missing.append(reference)
    assert not missing, f"the tour names what does not exist: {missing}"


def test_the_tour_is_short():
    """Put and get together pass through six files at most; what stands beside the way does not count."""
    way = (ROOT / "docs/tour.md").read_text().split("## Beside the way")[0]
    assert "## Put a block" in way
    assert "## Get a block" in way
    files = set(re.findall(r"`([\w./-]+\.(?:py|h|cc)):", way))
    assert len(files) <= 6, sorted(files)


def test_the_picture_of_states_is_current():
    from kvstored import _core

    spec = importlib.util.spec_from_file_location("states", ROOT / "docs/states.py")
    assert spec and spec.loader
    states = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(states)
    text = states.DOCUMENT.read_text()
    assert states.redrawn(text, _core.transitions()) == text, "run .venv/bin/python docs/states.py"
    # A table with one transition more is another picture: the comparison would see it.
    new = types.SimpleNamespace(before="FREE", event="new", after="SEALED")
    assert states.redrawn(text, [*_core.transitions(), new]) != text


def test_the_plot_is_of_the_table():
    spec = importlib.util.spec_from_file_location("plot", ROOT / "docs/plot.py")
    assert spec and spec.loader
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    rows = plot.rows((ROOT / "README.md").read_text())
    assert len(rows) == 8
    assert plot.plot(rows) == plot.PLOT.read_text(), "run .venv/bin/python docs/plot.py"


def test_who_tries_it_installs_nothing_for_the_tests():
    """`make demo` and `make serve`, as the first thing of a newcomer."""
    for targets, wanted in (("demo", "serve"), False), (("test",), True):
        command = ["make", "--dry-run", "--always-make", *targets]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert ("what the tests and lint need" in told) is wanted, targets
