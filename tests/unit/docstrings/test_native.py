"""Goal: the C++ classes that docs/tour.md names say of every public method what it does, takes and throws.

Method: their definitions in the headers of native/core, as text. A method has a comment above it or on its
line, which names the errors that its own `throw` statements name. Without one are: what only hands out a
member of its name, what overrides a method that has a comment where it is declared first, constructors (the
class's own comment stands for them) and what is `= default`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "native/core"
REFERENCE = re.compile(r"`native/[\w./-]+\.(?:cc|h):([\w~]+)(?:::[\w~]+)*`")
OPENS = re.compile(r"(class|struct) (?:\w+\([^)]*\) )?(\w+)(?: final)?(?: : [\w:, ]+)? \{$")
NO_METHOD = re.compile(r"(struct|class|enum|union|using|friend|typedef|#|static constexpr \w+ \w+ =)")
ACCESSOR = re.compile(r"[^(]*[ &*](\w+)\(\) const \{ return (?:\w+(?:->|\.))?\*?(\w+?)_?(?:\.load\(\))?; \}")


DEFINED = re.compile(r"^(?:[\w:<>,&* ]+ )?[*&]?(\w+)::(~?\w+)\(")
THROWN = re.compile(r"throw Error\(Code::(\w+)")


def named(tour: str) -> set[str]:
    return {name for name in REFERENCE.findall(tour) if name[0].isupper()}


def thrown(source: str) -> dict[tuple[str, str], set[str]]:
    """By class and method, the errors that the bodies in a source file throw by name."""
    found: dict[tuple[str, str], set[str]] = {}
    method: tuple[str, str] | None = None
    for line in source.splitlines():
        if opened := DEFINED.match(line):
            method = opened[1], opened[2]
        if method is not None and (errors := THROWN.findall(line)):
            found.setdefault(method, set()).update(errors)
        if line.startswith("}"):
            method = None
    return found


def declarations(lines: list[str]) -> list[tuple[int, str, str]]:
    """The public ones of a class's body: (line, text up to its `;` or `{`, its comment)."""
    found, public, comment, at = [], True, "", 0
    while at < len(lines):
        line = lines[at]
        if access := re.match(r" ?(public|private|protected):", line):
            public, comment = access[1] == "public", ""
        elif not line.strip() or line.startswith("   "):
            comment = comment if line.startswith("   ") else ""
        elif line.strip().startswith("//") and "// ----" not in line:
            comment += line
        elif line.startswith("  "):
            start, text = at, line.strip()
            while not re.search(r"[;{]", text):
                at += 1
                text += " " + lines[at].strip()
            if public:
                found.append((start, text, comment + text.partition("//")[2]))
            if "{" in text and "}" not in text:
                at = next(i for i in range(at, len(lines)) if lines[i].startswith("  }"))
            comment = ""
        at += 1
    return found


def uncommented(
    header: str, wanted: set[str], errors: Mapping[tuple[str, str], set[str]] | None = None
) -> list[str]:
    """What has no comment, or one that leaves out an error that is thrown there."""
    lines, found = header.splitlines(), []
    for number, line in enumerate(lines):
        if not (opened := OPENS.match(line)) or opened[2] not in wanted:
            continue
        end = next(i for i in range(number, len(lines)) if lines[i].startswith("}"))
        public = [] if opened[1] == "struct" else [" private:"]
        for at, text, comment in declarations([*public, *lines[number + 1 : end]]):
            called = re.search(r"([~\w]+)\(", text)
            if called and called[1] != opened[2]:
                unsaid = sorted((errors or {}).get((opened[2], called[1]), set()) - words(comment))
                where = f"{number + 2 + at - len(public)}: {opened[2]}::{called[1]}"
                found += [f"{where} throws {error}, unsaid" for error in unsaid]
            if comment or NO_METHOD.match(text) or not called or called[1].lstrip("~") == opened[2]:
                continue
            accessor = ACCESSOR.match(text)
            handed_out = accessor is not None and accessor[1] == accessor[2]
            if handed_out or " override" in text or re.search(r"= (default|delete);|operator", text):
                continue
            found.append(f"{number + 2 + at - len(public)}: {opened[2]}::{called[1]} has no comment")
    return found


def words(comment: str) -> set[str]:
    return set(re.findall(r"\w+", comment))


def test_the_classes_of_the_tour_say_what_their_methods_do():
    wanted = named((ROOT / "docs/tour.md").read_text())
    headers = {path: path.read_text() for path in sorted(CORE.rglob("*.h"))}
    errors: dict[tuple[str, str], set[str]] = {}
    for path in CORE.rglob("*.cc"):
        for method, named_errors in thrown(path.read_text()).items():
            errors.setdefault(method, set()).update(named_errors)
    lines = [line for text in headers.values() for line in text.splitlines()]
    defined = {match[2] for match in map(OPENS.match, lines) if match}
    assert len(wanted) > 12 and wanted <= defined, wanted - defined
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, text in headers.items()
        for line in uncommented(text, wanted, errors)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_check_sees_a_breach():
    said = "class A {\n public:\n  A();\n  int size() const { return size_; }\n"
    said += "  // Waits.\n  void f(\n      int a);\n"
    assert not uncommented(said + "};", {"A"})
    covered = "  void g() override;\n  void h();  // Ends.\n private:\n  void k();\n};"
    assert not uncommented(said + covered, {"A"})
    assert uncommented(said + "  void g();\n};", {"A"}) == ["8: A::g has no comment"]
    assert not uncommented(said + "  void g();\n};", {"B"})
    body = 'void A::f(int a) {\n  if (a) throw Error(Code::Lost, "x");\n}\n'
    body += "void other() {\n  throw Error(Code::No);\n}\n"
    assert thrown(body) == {("A", "f"): {"Lost"}}
    assert uncommented(said + "};", {"A"}, thrown(body)) == ["6: A::f throws Lost, unsaid"]
    assert not uncommented(said.replace("Waits.", "Waits. Throws Lost.") + "};", {"A"}, thrown(body))
