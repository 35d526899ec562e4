"""Goal: what review would otherwise have to watch in the source itself: sizes, names, openings, layers.

Method: read every file that git would commit and check it as text or by its syntax tree. Each failure names
file and line. The limits are those of CONTRIBUTING.md.
"""

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILE_LINES = 400
KERNEL_LINES = 600  # native/cpu and native/cuda
FUNCTION_LINES = 70
NATIVE_COLUMNS = 140  # Python's 110 are ruff's business, most of C++'s 130 clang-format's
SOURCE = {".py", ".cc", ".h", ".cu", ".cuh", ".proto"}
BANNED_IN_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|manager|handlers?|misc|v[2-9])(_|$)")


def committed() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    return sorted(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


FILES = committed()
SOURCES = [path for path in FILES if path.suffix in SOURCE]
PYTHON = [path for path in SOURCES if path.suffix == ".py"]
NATIVE = [path for path in SOURCES if path.suffix in {".cc", ".h", ".cu", ".cuh"}]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class Syntax(NamedTuple):
    """Of a file in Python; each with its line."""

    docstring: str
    functions: list[tuple[int, str, int]]  # and the lines of each
    bound: list[tuple[int, str]]  # names of locals and arguments


@cache
def syntax(path: Path) -> Syntax:
    tree = ast.parse(text(path))
    found = Syntax(ast.get_docstring(tree) or "", [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            found.functions.append((node.lineno, node.name, length))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.bound.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            found.bound.append((node.lineno, node.arg))
    return found


def fail_if(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_there_is_something_to_check():
    assert len(PYTHON) > 20
    assert len(NATIVE) > 20


def test_files_are_short():
    def limit(path: Path) -> int:
        return KERNEL_LINES if {"cpu", "cuda"} & set(path.relative_to(ROOT).parts) else FILE_LINES

    lengths = [(path, text(path).count("\n")) for path in SOURCES]
    fail_if([f"{name(path)}: {n} lines, limit {limit(path)}" for path, n in lengths if n > limit(path)])


def test_python_functions_are_short():
    problems = []
    for path in PYTHON:
        for line, function, length in syntax(path).functions:
            if length > FUNCTION_LINES:
                problems.append(f"{name(path)}:{line}: {function} has {length} lines")
    fail_if(problems)


NO_FUNCTION = "namespace|struct|class|enum|union|extern|//|switch|for|while|if|}|NB_MODULE"
OPENS_BLOCK = re.compile(rf"^(\s{{0,4}})(?!{NO_FUNCTION})\S.*\{{\s*$")


def test_native_functions_are_short():
    """By indentation: from a line that opens a block to the `}` at its depth; types only by their bodies."""
    problems = []
    for path in NATIVE:
        lines = text(path).splitlines()
        for number, line in enumerate(lines):
            if not (opened := OPENS_BLOCK.match(line)) or "(" not in line:
                continue
            closing = opened[1] + "}"
            end = next((i for i in range(number + 1, len(lines)) if lines[i].startswith(closing)), number)
            if end - number + 1 > FUNCTION_LINES:
                problems.append(f"{name(path)}:{number + 1}: {end - number + 1} lines: {line.strip()}")
    fail_if(problems)


def test_native_lines_fit():
    fail_if(
        [
            f"{name(path)}:{number}: {len(line)} columns, limit {NATIVE_COLUMNS}"
            for path in [*NATIVE, *(path for path in SOURCES if path.suffix == ".proto")]
            for number, line in enumerate(text(path).splitlines(), 1)
            if len(line) > NATIVE_COLUMNS
        ]
    )


def test_file_names_say_what_is_inside():
    fail_if([name(path) for path in FILES if BANNED_IN_NAMES.search(path.stem.lower())])


def test_nothing_is_left_for_later():
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
    fail_if(
        [
            f"{name(path)}:{number}: {line.strip()}"
            for path in FILES
            if path.suffix in SOURCE | {".md", ".toml", ".txt", ".sh", ""}
            for number, line in enumerate(text(path).splitlines(), 1)
            if marks.search(line)
        ]
    )


HOMES = "|".join(["ro" + "ot", "wo" + "rk", "ho" + "me", "o" + "pt/", "Us" + "ers"])
MACHINE = re.compile(
    rf"(?<![\w.])/({HOMES})(?=[/\s\"'`),.]|$)"
    r"|" + "py" + r"pi\.org|python" + r"hosted|deb\." + r"debian\.org|registry\." + "npmjs"
)


def test_no_path_or_host_of_somebodys_machine():
    problems = []
    for path in FILES:
        if path.suffix in {".png", ".svg", ".bin", ".gguf"} or path.name == "LICENSE":
            continue
        for number, line in enumerate(text(path).splitlines(), 1):
            if MACHINE.search(line):
                problems.append(f"{name(path)}:{number}: {line.strip()}")
    fail_if(problems)


def test_every_file_opens_with_what_it_is():
    problems = []
    for path in SOURCES:
        body = text(path)
        if path.suffix == ".py":
            if len(syntax(path).docstring) < 20:
                problems.append(f"{name(path)}: no module docstring")
        elif path.suffix == ".cc" and path.with_suffix(".h").exists():
            continue  # the header says it
        elif not body.startswith(("//", "/*")):
            problems.append(f"{name(path)}: no opening comment")
    fail_if(problems)


def test_every_test_file_states_its_goal():
    problems = []
    for path in FILES:
        if re.fullmatch(r"test_\w+\.py", path.name):
            if len(syntax(path).docstring) < 60:
                problems.append(f"{name(path)}: the docstring must say what is proven and how")
        elif path.name.endswith("_test.cc") and len(text(path).split("\n\n")[0]) < 60:
            problems.append(f"{name(path)}: the opening comment must say what is proven and how")
    fail_if(problems)


def test_tests_do_not_sleep():
    """Up to 50 ms between two looks at a condition is a poll; more is a guess."""
    poll = r"(?!0\)|0\.0[0-5]?\d*\))"
    sleeping = re.compile(rf"\btime\.sleep\({poll}|\basyncio\.sleep\({poll}|\bsleep_for\(|\busleep\(")
    fail_if(
        [
            f"{name(path)}:{number}: {line.strip()}"
            for path in FILES
            if path.suffix in SOURCE
            if path.is_relative_to(ROOT / "tests") or path.is_relative_to(ROOT / "native/tests")
            for number, line in enumerate(text(path).splitlines(), 1)
            if sleeping.search(line) and path != Path(__file__).resolve()
        ]
    )


def test_native_core_knows_no_framework():
    foreign = re.compile(r'#include\s+[<"](Python\.h|nanobind|pybind11|cuda|torch|ATen|c10)')
    core = [path for path in NATIVE if path.is_relative_to(ROOT / "native/core")]
    assert core
    fail_if(
        [
            f"{name(path)}:{number}: {line}"
            for path in core
            for number, line in enumerate(text(path).splitlines(), 1)
            if foreign.search(line)
        ]
    )


def test_generated_code_is_not_committed():
    fail_if([name(path) for path in FILES if re.search(r"_pb2(_grpc)?\.pyi?$|\.so$", path.name)])


def test_every_dependency_is_pinned():
    """`make` installs what pyproject.toml names at the versions of constraints.txt, not at the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(name for extra in project["project"]["optional-dependencies"].values() for name in extra),
        *(name for group in project["dependency-groups"].values() for name in group),
    ]
    names = {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names <= {pin.lower().replace("_", "-") for pin in pins}


@pytest.mark.parametrize("extension", [".py", ".cc"])
def test_the_rules_catch_a_breach(extension: str):
    """The two hand-made patterns above, tried on a line they must catch and one they must not."""
    assert MACHINE.search("open('/ro" + "ot/x')") and not MACHINE.search("a/work" + extension)
    assert BANNED_IN_NAMES.search("block_utils") and not BANNED_IN_NAMES.search("commonality")
    assert OPENS_BLOCK.match("void f(int x) {") and not OPENS_BLOCK.match("struct A {")


PROSE_COLUMNS = 110
TABLE_COLUMNS = 5
UNBROKEN = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)")


def prose(path: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page outside of code."""
    lines, code = [], False
    for number, line in enumerate(text(path).splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif not code and not line.startswith("    "):
            lines.append((number, line))
    return lines


PAGES = [path for path in FILES if path.suffix == ".md"]


def test_prose_is_narrow():
    """A table's rows may be wider, and what cannot be broken: a link, a command."""
    problems = []
    for path in PAGES:
        for number, line in prose(path):
            longest = max((len(whole) for whole in UNBROKEN.findall(line)), default=0)
            if not line.startswith("|") and len(line) > max(PROSE_COLUMNS, longest + 8):
                problems.append(f"{name(path)}:{number}: {len(line)} columns, limit {PROSE_COLUMNS}")
    fail_if(problems)


def test_tables_are_small_enough_to_read():
    """Those made by a program, which a comment before them says, may be a matrix."""
    problems = []
    for path in PAGES:
        lines = text(path).splitlines()
        for number, line in prose(path):
            if number > 2 and lines[number - 3].startswith("<!--"):
                continue
            columns = line.count("|") - 1
            if re.fullmatch(r"\|[-:| ]+\|", line) and columns > TABLE_COLUMNS:
                problems.append(f"{name(path)}:{number}: {columns} columns, limit {TABLE_COLUMNS}")
    fail_if(problems)


HOUSES = ("bench", "kvclient", "kvstored", "native", "tests")
ROOMS = 12  # modules of one folder; a header and its source are one
KERNELS_AND_TESTS = {"native/cpu", "native/cuda", "native/core/store", "native/tests"}


def test_a_folder_has_few_rooms():
    rooms: dict[str, set[str]] = {}
    for path in SOURCES:
        folder = name(path.parent)
        if path.stem not in {"__init__", "conftest"} and folder.startswith(HOUSES):
            rooms.setdefault(folder, set()).add(path.stem)
    fail_if(
        [
            f"{folder}: {len(stems)} modules, limit {ROOMS}"
            for folder, stems in rooms.items()
            if folder not in KERNELS_AND_TESTS and len(stems) > ROOMS
        ]
    )


def without_comments(code: str) -> str:
    """C++ without what is said in it: comments and strings; the lines stay where they are."""
    said = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return said.sub(lambda found: "\n" * found.group().count("\n"), code)


SAY_NOTHING = {"own", "one", "given"}  # as names of locals and arguments: a thing is called what it is


def test_names_say_what_they_hold():
    problems = []
    for path in PYTHON:
        for line, called in syntax(path).bound:
            if called in SAY_NOTHING:
                problems.append(f"{name(path)}:{line}: a local called {called}")
    for path in NATIVE:
        for number, line in enumerate(without_comments(text(path)).splitlines(), 1):
            for called in re.findall(rf"\b({'|'.join(sorted(SAY_NOTHING))})\b", line):
                problems.append(f"{name(path)}:{number}: something called {called}")
    fail_if(problems)


def test_cited_sections_exist():
    """`docs/design.md §5`: a page of this repository, and a heading of it."""
    problems = []
    for path in [*SOURCES, *PAGES]:
        for number, line in enumerate(text(path).splitlines(), 1):
            for page, section in re.findall(r"docs/(\w+)\.md §(\d+)", line):
                cited = ROOT / "docs" / f"{page}.md"
                if not cited.is_file() or f"\n## {section}. " not in text(cited):
                    problems.append(f"{name(path)}:{number}: docs/{page}.md has no section {section}")
            if re.search(r"(?<!docs/)(?<!\[)\bdesign §", line):
                problems.append(f"{name(path)}:{number}: which design? docs/design.md has sections")
    fail_if(problems)


CITED = re.compile(r"(?<![\w./<$*-])((?:\w+/)*[\w-]+\.(?:py|cc|h|cu|md))\b(?![\w(])")


def test_cited_files_exist():
    """By the path below some folder: `cpu/halves.h`, `pool_files.py`; tests in Python by their first words,
    C++ by its comments."""
    known = {"/".join(path.parts[at:]) for path in FILES for at in range(len(path.parts))}
    problems = []
    for path in [*PYTHON, *NATIVE]:
        place, _, _ = name(path).partition("/")
        if path.suffix != ".py":
            words = "\n".join(re.findall(r"//[^\n]*", text(path)))
        elif place in ("kvstored", "kvclient", "tests"):
            words = syntax(path).docstring if place == "tests" else text(path)
        else:
            continue
        absent = sorted(set(CITED.findall(words)) - known)
        problems += [f"{name(path)}: {cited} is nowhere" for cited in absent]
    fail_if(problems)
