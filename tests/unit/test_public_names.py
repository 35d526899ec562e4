"""Goal: kvclient exports exactly its public names, and importing it is cheap. Method: compare __all__ with
what the modules define, and look at sys.modules in a fresh interpreter.
"""

import json
import subprocess
import sys

import kvclient
import kvclient.errors


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


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(kvclient, "no_such_name")


def test_importing_loads_nothing_heavy():
    loaded = in_fresh_interpreter(
        "import json, sys, kvclient, kvclient.client; print(json.dumps(list(sys.modules)))"
    )
    heavy = {"torch", "transformers", "numpy", "grpc", "kvclient._core", "kvclient.hf"}
    assert not heavy.intersection(loaded)


def test_the_fake_does_not_load_torch():
    use = "kvclient.InMemoryClient(1 << 20).stats()"
    code = f"import json, sys, kvclient; {use}; print(json.dumps(list(sys.modules)))"
    assert not {"torch", "transformers", "kvclient._core"}.intersection(in_fresh_interpreter(code))
