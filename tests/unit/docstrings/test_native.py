"""Goal: the C++ classes that docs/tour.md names say of every public method what it does, takes and throws.

Method: their definitions in the headers of native/core, as text. A method has a comment above it or on its
line. Without one are: what only hands out a member of its name, what overrides a method that has a comment
where it is declared first, constructors (the class's own comment stands for them) and what is `= default`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "native/core"
REFERENCE = re.compile(r"`native/[\w./-]+\.(?:cc|h):([\w~]+)(?:::[\w~]+)*`")
OPENS = re.compile(r"(class|struct) (?:\w+\([^)]*\) )?(\w+)(?: final)?(?: : [\w:, ]+)? \{$")
NO_METHOD = re.compile(r"(struct|class|enum|union|using|friend|typedef|#|static constexpr \w+ \w+ =)")
ACCESSOR = re.compile(r"[^(]*[ &*](\w+)\(\) const \{ return (?:\w+(?:->|\.))?\*?(\w+?)_?(?:\.load\(\))?; \}")


def named(tour: str) -> set[str]:
    return {name for name in REFERENCE.findall(tour) if name[0].isupper()}


def declarations(lines: list[str]) -> list[tuple[int, str, bool]]:
    """The public ones of a class's body: (line, text up to its `;` or `{`, whether it has a comment)."""
    found, public, commented, at = [], True, False, 0
    while at < len(lines):
        line = lines[at]
        if access := re.match(r" ?(public|private|protected):", line):
            public, commented = access[1] == "public", False
        elif not line.strip() or line.startswith("   "):
            commented = commented and line.startswith("   ")
        elif line.strip().startswith("//") and "// ----" not in line:
            commented = True
        elif line.startswith("  "):
            start, text = at, line.strip()
            while not re.search(r"[;{]", text):
                at += 1
                text += " " + lines[at].strip()
            if public:
                found.append((start, text, commented or "//" in text))
            if "{" in text and "}" not in text:
                at = next(i for i in range(at, len(lines)) if lines[i].startswith("  }"))
            commented = False
        at += 1
    return found


def uncommented(header: str, wanted: set[str]) -> list[str]:
    lines, found = header.splitlines(), []
    for number, line in enumerate(lines):
        if not (opened := OPENS.match(line)) or opened[2] not in wanted:
            continue
        end = next(i for i in range(number, len(lines)) if lines[i].startswith("}"))
        public = [] if opened[1] == "struct" else [" private:"]
        for at, text, commented in declarations([*public, *lines[number + 1 : end]]):
            called = re.search(r"([~\w]+)\(", text)
            if commented or NO_METHOD.match(text) or not called or called[1].lstrip("~") == opened[2]:
                continue
            accessor = ACCESSOR.match(text)
            handed_out = accessor is not None and accessor[1] == accessor[2]
            if handed_out or " override" in text or re.search(r"= (default|delete);|operator", text):
                continue
            found.append(f"{number + 2 + at - len(public)}: {opened[2]}::{called[1]}")
    return found


def test_the_classes_of_the_tour_say_what_their_methods_do():
    wanted = named((ROOT / "docs/tour.md").read_text())
    headers = {path: path.read_text() for path in sorted(CORE.rglob("*.h"))}
    lines = [line for text in headers.values() for line in text.splitlines()]
    defined = {match[2] for match in map(OPENS.match, lines) if match}
    assert len(wanted) > 12 and wanted <= defined, wanted - defined
    found = [
        f"{path.relative_to(ROOT)}:{line} has no comment"
        for path, text in headers.items()
        for line in uncommented(text, wanted)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_check_sees_a_breach():
    said = "class A {\n public:\n  A();\n  int size() const { return size_; }\n"
    said += "  // Waits.\n  void f(\n      int a);\n"
    assert not uncommented(said + "};", {"A"})
    covered = "  void g() override;\n  void h();  // Ends.\n private:\n  void k();\n};"
    assert not uncommented(said + covered, {"A"})
    assert uncommented(said + "  void g();\n};", {"A"}) == ["8: A::g"]
    assert not uncommented(said + "  void g();\n};", {"B"})
