"""Goal: a type checker knows what a user's program holds: chains, look-ups, blocks, writers and their views.

Method: mypy --strict runs on such a program, and on one with mistakes that it must find; the stub of the
native module is compared with the module's own members. torch and transformers are left out: minutes of work.
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvclient
from kvclient import _core

KEPT = Path(__file__).resolve().parents[3] / "build/mypy"  # what mypy read before: NumPy's stubs above all
STUB = Path(kvclient.__file__).parent / "_core.pyi"
PROGRAM = """
import kvclient

client = kvclient.connect()
chain = kvclient.chain(bytes(32), [1, 2, 3])
reveal_type(kvclient.__version__)
reveal_type(chain)
reveal_type(chain[0])
reveal_type(chain[:1])
reveal_type(client.lookup(chain).resident)
layout = client.register_layout(kvclient.Layout(1, 1, 8))
with client.create(chain, layout) as writer:
    reveal_type(writer)
    for index in writer.granted:
        reveal_type(writer[index].layer(0))
        writer[index].view[:] = b"x"
with client.get(chain) as blocks:
    reveal_type(blocks)
    for block in blocks:
        reveal_type(block)
        if block is not None:
            reveal_type(block.layer(0))
            reveal_type(block.tokens)
"""
TOLD = [
    "str", "kvclient._core.Chain", "bytes", "kvclient._core.Chain", "int", "kvclient._core.Writer", "NDArray",
    "kvclient._core.Blocks", "kvclient._core.BlockView | None", "NDArray", "int",
]  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[str]:
    """What mypy says of both programs: it reads kvclient once."""
    directory = tmp_path_factory.mktemp("mypy")
    (directory / "user.py").write_text(PROGRAM)
    (directory / "wrong.py").write_text(PROGRAM + "\nwriter.sael()\nblocks[0].layer(0)\n")
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "transformers"))
    (directory / "mypy.ini").write_text("[mypy]\n" + skipped)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", KEPT,
         "user.py", "wrong.py"],
        cwd=directory, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return (done.stdout + done.stderr).splitlines()


def test_mypy_knows_what_a_program_holds(told):
    said = [line for line in told if not line.startswith("wrong.py")]
    assert said.pop().startswith("Found 2 errors in 1 file"), told
    revealed = [line.split('"', 1)[1].rstrip('"') for line in said if "Revealed type" in line]
    assert len(revealed) == len(TOLD), said
    for found, wanted in zip(revealed, TOLD, strict=True):
        assert found == wanted or (wanted == "NDArray" and "ndarray" in found), (found, wanted)


def test_mypy_finds_a_mistake(told):
    said = "\n".join(line for line in told if line.startswith("wrong.py"))
    assert '"Writer" has no attribute "sael"' in said, said
    assert 'of "BlockView | None" has no attribute' in said, said


def named(member: ast.stmt) -> str:
    """A method, or a field of a tuple."""
    return member.target.id if isinstance(member, ast.AnnAssign) else getattr(member, "name", "")


def test_the_stub_names_what_the_module_has():
    tree = ast.parse(STUB.read_text())
    told = {
        node.name: {name for member in node.body if (name := named(member)) and not name.startswith("_")}
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for name, kind in inspect.getmembers(_core, inspect.isclass):
        if kind.__module__ == "kvclient._core":
            there = kind.__match_args__ if issubclass(kind, tuple) else vars(kind)
            assert told[name] == {member for member in there if not member.startswith("_")}, name
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    native = {name for name in vars(_core) if not name.startswith("_") and callable(getattr(_core, name))}
    assert functions == native - set(told)
