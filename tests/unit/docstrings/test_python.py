"""Goal: a public function of kvclient says what goes in, what comes out and what it raises.

Method: the syntax trees of kvclient's modules. Everything public has a docstring, its own or that of the
method it stands for. Where an array goes in or comes out there is its shape, in brackets or in words; where a
size or a time does, its unit: in the argument's name, else in the docstring of the function or its class.
What its own `raise` statements name is named.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROMISED = (
    "kvclient/blocks", "kvclient/checks", "kvclient/client", "kvclient/hf", "kvclient/integrations",
    "kvclient/kernels", "kvclient/serve", "kvclient/testing/in_",
)  # fmt: skip
PROTOCOL = {"AttributeError", "NotImplementedError", "StopIteration"}  # Python's own ways to say no

ARRAY = re.compile(r"\b(ndarray|Tensor)\b")
SHAPE = re.compile(r"\[[^\]]+\]|\bshapes?\b")
NUMBER = re.compile(r"(int|float)( \| (int|float|None))*")
QUANTITY = {
    "age", "backoff", "budget", "capacity", "count", "deadline", "delay", "interval", "lease", "length",
    "lifetime", "limit", "memory", "most", "offset", "patience", "pause", "period", "quota", "seconds",
    "size", "stall", "timeout", "ttl", "wait", "width", "window",
}  # fmt: skip
UNIT = re.compile(
    r"\b(bytes?|tokens?|columns?|seconds?|blocks?|rows?|layers?|pages?|positions?|elements?|keys?|bits?|items?|heads?"
    r"|calls?|turns?|clock|shapes?)\b|multiple",
    re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A public function or method, with what its class and its class's bases say."""

    line: int
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    around: str  # its class's docstring
    stands_for: bool  # a documented method of a base, or one of a base from outside

    @property
    def said(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def arguments(self) -> list[ast.arg]:
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    @property
    def marks(self) -> str:
        return " ".join(ast.unparse(mark) for mark in self.node.decorator_list)


def base_names(definition: ast.ClassDef) -> list[str]:
    return [getattr(base, "id", getattr(base, "attr", "")) for base in definition.bases]


def inherits(definition: ast.ClassDef | None, method: str, classes: dict[str, ast.ClassDef]) -> bool:
    for name in base_names(definition) if definition else ():
        if name in {"", "Protocol", "NamedTuple", "Enum", "IntEnum", "object"}:
            continue
        if name not in classes or inherits(classes[name], method, classes):
            return True  # of torch or transformers: its documentation holds
        methods = {getattr(node, "name", ""): node for node in classes[name].body}
        if method in methods and ast.get_docstring(methods[method]):
            return True
    return False


def functions(
    body: list[ast.stmt], classes: dict[str, ast.ClassDef], of: ast.ClassDef | None = None, within: str = ""
) -> Iterator[Function]:
    for node in body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, classes, node, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            around = (ast.get_docstring(of) or "") if of else ""
            yield Function(node.lineno, within + node.name, node, around, inherits(of, node.name, classes))


def raised_by(function: ast.AST) -> set[str]:
    """The classes that its `raise` statements name; a bare one, and one of a variable, name none."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            names.add(getattr(error, "id", getattr(error, "attr", "")))
    return {found for found in names if found[:1].isupper()} - PROTOCOL


def without_unit(function: Function) -> list[str]:
    """Arguments, and the function itself, that are an amount of something and do not say of what."""
    amounts = [
        argument.arg
        for argument in function.arguments
        if argument.annotation and NUMBER.fullmatch(ast.unparse(argument.annotation))
    ]
    if function.node.returns and NUMBER.fullmatch(ast.unparse(function.node.returns)):
        amounts.append(function.node.name)
    said = UNIT.search(f"{function.said} {function.around}")
    return [name for name in amounts if name.split("_")[-1] in QUANTITY and not said]


def unsaid(function: Function) -> list[str]:
    """What a reader of the docstring would have to look up in the code."""
    if "overload" in function.marks or ".setter" in function.marks:
        return []
    errors = sorted(raised_by(function.node))
    found = [f"raises {error} unsaid" for error in errors if error not in function.said]
    if function.stands_for:
        return found
    if not function.said:
        return [*found, "has no docstring"]
    annotations = [argument.annotation for argument in function.arguments] + [function.node.returns]
    arrays = any(ARRAY.search(ast.unparse(annotation)) for annotation in annotations if annotation)
    if arrays and not SHAPE.search(f"{function.said} {function.around}"):
        found.append("takes or gives an array of an unsaid shape")
    return found + [f"{amount} has no unit" for amount in without_unit(function)]


def problems(sources: dict[str, str]) -> list[str]:
    trees = {path: ast.parse(source) for path, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    return [
        f"{path}:{function.line}: {function.name}: {what}"
        for path, tree in trees.items()
        for function in functions(tree.body, classes)
        for what in unsaid(function)
    ]


def test_what_kvclient_promises_is_said():
    paths = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "kvclient").rglob("*.py"))}
    sources = {name: path.read_text() for name, path in paths.items() if name.startswith(PROMISED)}
    assert len(sources) > 100
    found = problems(sources)
    assert not found, "\n" + "\n".join(found)


def test_the_check_sees_each_breach():
    def found(source: str) -> list[str]:
        return [line.split(": ", 1)[1] for line in problems({"a.py": source})]

    assert found("def f(x: int) -> int:\n  return x") == ["f: has no docstring"]
    wrong = 'class A:\n  def f(self):\n    """Does."""\n    raise Lost("x")'
    assert found(wrong) == ["A.f: raises Lost unsaid"]
    assert not found(wrong.replace("Does.", "Raises Lost."))
    array = 'def f(x: np.ndarray):\n  """Sorts x."""'
    assert found(array) == ["f: takes or gives an array of an unsaid shape"]
    assert not found(array.replace("x.", "x [rows]."))
    assert found('def f() -> torch.Tensor:\n  """Ids."""')
    time = 'def f(timeout: float | None):\n  """Waits."""'
    assert found(time) == ["f: timeout has no unit"]
    assert not found(time.replace("Waits.", "Waits so many seconds."))
    assert not found(time.replace("timeout", "timeout_s"))
    base = 'class A:\n  def f(self):\n    """Does."""\nclass B(A):\n  def f(self):\n    pass'
    assert not found(base)
