"""Goal: kvstored.h is plain C and plain C++, kvstored.hpp is C++20, the library shows nothing but what
kvstored.h declares, and the header says of each function what it may wait for.

Method: compilers read the headers with every warning an error; the library's dynamic symbols beside the
header's; the note before each declaration, behind it, or of its section.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "native/include/kvstored/kvstored.h"
LIBRARY = ROOT / "build/dev/capi/libkvstored_client.so"
USER = """#include <kvstored/kvstored.h>
int main(void) { return kvs_api_version() != KVS_API_VERSION; }
"""
STRICT = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]


DIALECTS = [
    ("cc", "-std=c99"),
    ("cc", "-std=c17"),
    ("c++", "-std=c++11"),
    ("c++", "-std=c++20"),
    ("c++", "-std=c++23"),
]


@pytest.mark.parametrize(("compiler", "language"), DIALECTS)
def test_a_compiler_takes_it_without_a_warning(tmp_path, compiler, language):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    source = tmp_path / ("user.c" if compiler == "cc" else "user.cc")
    modern = language >= "-std=c++20" and compiler == "c++"
    source.write_text(USER.replace("kvstored.h", "kvstored.hpp") if modern else USER)
    command = [compiler, language, *STRICT, "-I", HEADER.parents[1], source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_library_shows_what_the_header_declares_and_nothing_else():
    if shutil.which("nm") is None:
        pytest.skip("there is no nm here")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    shown = {line.split()[-1] for line in listed.splitlines() if line.split()[1] in "TWDBRVu"}
    declared = set(re.findall(r"\b(kvs_\w+)\(", HEADER.read_text())) - {"kvs_default_options()"}
    assert {name.split("@")[0] for name in shown} == declared
    assert all(name.endswith("@@KVSTORED_1") for name in shown), "a symbol has no version"


SAYS = re.compile(r"[Ww]aits? |[Aa]sks? (the daemon|nobody)|[Rr]eads shared memory")


def functions(text):
    """Of each that is declared: its name, and its notes: its note, and its section's."""
    text = text[text.index("/* ---- the library") :]
    section = note = ""
    for part in re.findall(r"/\*.*?\*/[ ]*\n?|[^/]+", text, re.DOTALL):
        if part.startswith("/* ----"):
            section, note = part, ""
        elif part.startswith("/*"):
            note = part
        else:
            for line in part.splitlines():
                if found := re.match(r"[a-z].*?\b(kvs_\w+)\(", line):
                    behind = text[text.index(line) :].split(";", 1)[1].split("\n", 1)[0]
                    yield found[1], re.sub(r"\s*\n \*\s*", " ", section + note + behind)
                    note = ""


def test_the_header_says_of_each_function_what_it_may_wait_for():
    found = dict(functions(HEADER.read_text()))
    assert set(found) == set(re.findall(r"\b(kvs_\w+)\(", HEADER.read_text()))
    assert [name for name, notes in found.items() if not SAYS.search(notes)] == []
