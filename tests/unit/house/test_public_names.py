"""Goal: kvclient exports exactly its public names, each described; the fake and what stands for a store that
cannot be reached have the same ones; importing is cheap. Method: compare __all__ with what the modules define
and the members of one class with another's, and look at sys.modules in a fresh interpreter.
"""

import ast
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvclient
import kvclient.errors
from kvclient import _core as core


def in_fresh_interpreter(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


def test_every_name_of_all_exists_and_is_the_thing_itself():
    for name in kvclient.__all__:
        value = getattr(kvclient, name)
        assert getattr(value, "__name__", name) in (name, "Chain"), name
    assert set(kvclient.__all__) <= set(dir(kvclient))


def test_all_errors_but_the_internal_one_are_public():
    assert set(kvclient.errors.__all__) - {"Detached"} <= set(kvclient.__all__)
    for name in kvclient.errors.__all__:
        assert issubclass(getattr(kvclient.errors, name), kvclient.KVClientError)
        assert f"── {name} " in kvclient.errors.__doc__ or name == "KVClientError", (
            f"{name} is not in the tree"
        )


def test_the_promised_names_are_there():
    promised = {
        "connect",
        "KVClient",
        "Layout",
        "chain",
        "Chain",
        "InMemoryClient",
        "copy_into",
        "crc32c",
        "metrics",
    }
    assert promised <= set(kvclient.__all__)


NATIVE = ("Lookup", "Blocks", "BlockView", "Writer", "GrantedBlock")
# What needs a daemon's session.
OF_A_SESSION = {"session", "epoch", "populated_bytes", "grpc_token", "register_region"}


def members(kind: type) -> dict[str, object]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


def parameters(member: object) -> list[str] | None:
    """Names of a method's parameters; None for what is no method. Native ones stand in the docstring."""
    if inspect.isroutine(member) and hasattr(member, "__code__"):
        return list(inspect.signature(member).parameters)
    text = (getattr(member, "__doc__", None) or "").split("\n")[0]
    if isinstance(member, property) or "(self" not in text:
        return None
    (function,) = ast.parse(f"def {text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in function.args.args]


def stand_ins() -> list[tuple[type, object]]:
    """A class of the library, and an object that stands for one of it."""
    from kvclient import _core
    from kvclient.client import breaker, tolerant

    def nobody_there():
        raise kvclient.Unavailable

    fake = kvclient.InMemoryClient(1 << 20)
    writer = fake.create([bytes(32)], fake.register_layout(kvclient.Layout(1, 1, 8)))
    granted = writer[0]
    blocks = fake.get([bytes(32)], follow=True)
    granted.layer(0)[...] = 0
    granted.mark_layer(0)
    fakes = (fake.lookup([]), blocks, blocks[0], writer, granted)
    empty = {name: getattr(breaker, f"No{name}")(1) for name in ("Lookup", "Blocks", "Writer")}
    return [
        *((getattr(_core, name), fake) for name, fake in zip(NATIVE, fakes, strict=True)),
        *((getattr(_core, name), value) for name, value in empty.items()),
        (kvclient.KVClient, fake),
        (kvclient.KVClient, tolerant.TolerantClient(nobody_there, "default")),
    ]


def test_what_stands_for_it_has_the_same_members():
    for real, other in stand_ins():
        name_of_it = type(other).__name__
        for name, member in members(real).items():
            if name in OF_A_SESSION and real is kvclient.KVClient:
                continue
            assert hasattr(other, name), f"{name_of_it} has no {name}"
            if (wanted := parameters(member)) is not None:
                assert parameters(getattr(type(other), name)) == wanted, f"{name_of_it}.{name}"


def test_every_member_is_described():
    from kvclient import _core

    public = [getattr(kvclient, name) for name in kvclient.__all__]
    kinds = [thing for thing in public if inspect.isclass(thing)] + [getattr(_core, name) for name in NATIVE]
    bare = []
    for kind in kinds:
        assert kind.__doc__, kind
        for name, member in members(kind).items():
            text = getattr(member, "__doc__", None) or ""
            if callable(member) or isinstance(member, property):
                said = text if not text.startswith(("(self", f"{name}(")) else text.partition("\n\n")[2]
                if not said.strip() and name not in ("with_traceback", "add_note"):
                    bare.append(f"{kind.__name__}.{name}")
    assert not bare, f"nothing is said of {', '.join(bare)}"
    for thing in public:
        assert thing.__doc__, thing


def test_type_checkers_see_the_same_names():
    package = Path(kvclient.__file__).parent
    stub = ast.parse((package / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    told = {alias.name: where.module for where in imports for alias in where.names}
    assert told.pop("hf") == "kvclient" and told == kvclient._HOME
    assert (package / "py.typed").exists()  # without it they read none of it


def test_both_packages_are_of_one_version():
    import kvstored

    assert kvclient.__version__ == kvstored.__version__


@pytest.mark.parametrize(
    "program",
    [
        "import kvclient; kvclient.chain",
        "import kvclient; kvclient.Chain",
        "import kvclient; kvclient.connect(dir='/nowhere')",
        "from kvstored import _core",
        "import kvstored.server",
    ],
)
def test_a_clone_that_was_not_built_says_what_to_do(program, tmp_path):
    """After `pip install .` Python started in the clone finds the clone first."""
    for package in ("kvclient", "kvstored"):
        source = Path(kvclient.__file__).parents[1] / package
        shutil.copytree(source, tmp_path / package, ignore=shutil.ignore_patterns("_core*.so", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}") and "`make build`" in last


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(kvclient, "no_such_name")


def test_importing_loads_nothing_heavy():
    loaded = in_fresh_interpreter(
        "import json, sys, kvclient, kvclient.client.connect; print(json.dumps(list(sys.modules)))"
    )
    heavy = {"torch", "transformers", "numpy", "grpc", "kvclient._core", "kvclient.hf"}
    assert not heavy.intersection(loaded)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_the_hook_says_what_to_install(missing):
    pytest.importorskip(missing)
    said = in_fresh_interpreter(f"""
import importlib.util, json
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == {missing!r} else find(name, *more)
import kvclient
try:
    kvclient.hf
except ModuleNotFoundError as error:
    print(json.dumps([str(error), error.name]))
""")
    assert said == [f"kvclient.hf needs {missing}: pip install torch transformers", missing]


def test_the_fake_does_not_load_torch():
    use = "kvclient.InMemoryClient(1 << 20).stats()"
    code = f"import json, sys, kvclient; {use}; print(json.dumps(list(sys.modules)))"
    assert not {"torch", "transformers", "kvclient._core"}.intersection(in_fresh_interpreter(code))


def test_methods_of_the_native_classes_refuse_another_object():
    """Those that take themselves as a bare object would read a stranger's memory."""
    for call in (core.Blocks.__getitem__, core.Blocks.__iter__, core.Blocks.release):
        for stranger in (object(), 7, None):
            with pytest.raises(TypeError):
                call(stranger, *(0,) * (call is core.Blocks.__getitem__))


@pytest.mark.parametrize("kind", ["daemon", "memory"])
def test_results_say_what_they_are(kind, request):
    """In a notebook `client.lookup(chain)` is the first thing one looks at."""
    client = kvclient.InMemoryClient() if kind == "memory" else request.getfixturevalue("daemon")().connect()
    layout = client.register_layout(
        kvclient.Layout(block_tokens=16, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")
    )
    chain = kvclient.chain(bytes(32), range(48), block_tokens=16)
    with client.create(chain[:2], layout) as writer:
        assert repr(writer) == "<Writer: 2 of 2 granted>"
        assert repr(writer[0]) == "<GrantedBlock for 16 tokens>"
        for index in writer.granted:
            writer[index].layer(0)[...] = writer[index].layer(1)[...] = 1
    assert repr(client.lookup(chain)) == "<Lookup of 3 blocks: 2 resident, 0 pending, 0 on disk>"
    with client.get(chain) as blocks:
        assert repr(blocks) == "<Blocks: 2 of 3 found>"
        assert repr(blocks[0]) == "<BlockView of 16 tokens, 2 of 2 layers there>"


def test_every_public_name_and_method_says_what_it_does():
    import kvclient.hf

    silent = []
    for module in (kvclient, kvclient.hf):
        for name in module.__all__:
            value = getattr(module, name)
            silent += [] if inspect.getdoc(value) else [name]
            members = [m for m in vars(value) if not m.startswith("_")] if inspect.isclass(value) else []
            silent += [f"{name}.{m}" for m in members if not _told(value, m)]
    assert silent == []


def _told(owner: type, member: str) -> bool:
    """A plain attribute is told of by its class."""
    value = inspect.getattr_static(owner, member)
    described = callable(value) or isinstance(value, property | classmethod | staticmethod)
    return not described or bool(inspect.getdoc(getattr(owner, member)))
