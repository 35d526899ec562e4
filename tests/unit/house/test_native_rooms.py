"""The files of a folder of C++ can be compiled as one, which a build without ccache does (CMakeLists.txt).

Their anonymous namespaces are one then, so a name stands in only one file of a folder. Read line by line:
what clang-format leaves at the left margin between `namespace {` and its end is a declaration.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("native/core/*", "native/bindings/*")
BEGIN, END = "namespace {", "}  // namespace"
TYPE = re.compile(r"^(?:struct|class|enum class|enum) (\w+)|^using (\w+) =")
OTHER = re.compile(r"^[\w\[].*?[ &*](\w+)(?:\(|\[\w*\] ?=|\{| = |;)")


def names(source: str) -> set[str]:
    """What the anonymous namespaces of a file declare."""
    found, inside = set(), False
    for line in source.splitlines():
        if line in (BEGIN, END):
            inside = line == BEGIN
        elif inside and (match := TYPE.match(line) or OTHER.match(line)):
            found.add(match[match.lastindex])
    return found


def test_what_is_read_as_a_name():
    source = """namespace {
constexpr uint64_t kPause = 3;
struct Row {
  int inside = 1;
};
[[noreturn]] void fail(const char* why) { throw why; }
std::vector<int> all(int n) {
PyType_Slot slots[] = {{0, nullptr}};
const std::string& text(int);
}  // namespace
int outside(int);
"""
    assert names(source) == {"kPause", "Row", "fail", "all", "slots", "text"}


def folders() -> list[Path]:
    command = ["git", "ls-files", "native/*.cc"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {Path(path).parent for path in tracked.stdout.split()}
    return sorted(room for room in rooms if any(room.match(pattern) for pattern in ROOMS))


@pytest.mark.parametrize("folder", folders(), ids=str)
def test_a_name_stands_in_one_file_of_a_folder(folder):
    where = defaultdict(list)
    for file in sorted((ROOT / folder).glob("*.cc")):
        for name in names(file.read_text()):
            where[name].append(file.name)
    assert not {name: files for name, files in where.items() if len(files) > 1}
