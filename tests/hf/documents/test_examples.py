"""Goal: the examples of README and docs run as they stand.

Method: each page's Python is executed, block after block in one namespace, in which only what the page takes
as given is there before: a tiny model and its directory, a daemon that kvclient.connect() finds, a prompt.
Lines for a shell are read by the programs' own parsers, the daemon's file by the daemon, C by a compiler.
A block that nothing here or elsewhere executes fails.
"""

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from tests.conftest import ROOT
from tests.hf.zoo import build

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {  # page, language: the test that runs it
    ("c-api.md", "sh"): "tests/unit/house/test_wheels.py",
    ("engines.md", "sh"): "tests/engines/test_documented.py",
    ("engines.md", "yaml"): "tests/engines/test_documented.py",
    ("serving.md", "json"): "tests/serve/test_other_contracts.py",
}
TEXT = "Every heron of the marsh was counted again before the gates of the lock were shut. "


def blocks(page, language):
    """(the line it begins at, its text) of each."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: met.start()].count("\n") + 2, met[1]) for met in found]


def test_every_block_is_executed_somewhere():
    here = {(page.name, language) for page, language in [*PYTHON, *OTHERS]}
    for page in PAGES:
        for language in set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)) - {"text"}:
            where = ELSEWHERE.get((page.name, language))
            assert (page.name, language) in here or where, f"{page.name}: nothing runs its {language}"
            if where:
                assert (
                    page.name
                    in (ROOT / where).read_text() + (ROOT / "tests/engines/documented.py").read_text()
                )


# ---------------------------------------------------------------- Python

PYTHON = [(page, "python") for page in PAGES if blocks(page, "python")]


@pytest.fixture
def served(daemon, monkeypatch):
    """What kvclient.connect() finds."""
    running = daemon(memory="320MiB")
    monkeypatch.setenv("KVSTORED_DIR", str(running.dir))
    return running


def readme(home):
    return {"name": home, "long_prompt": TEXT * 5}


def c_api(home):
    client = kvclient.connect()
    plan = kvclient.Layout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=16)
    layout = client.register_layout(plan)
    with client.register_region(1 << 20) as region:
        slot = region.block_bytes(layout)
        pages = region.buffers_at(layout, [2 * slot, 3 * slot])
    keys, others = (kvclient.chain(bytes([n]) * 32, list(range(32)), block_tokens=16) for n in (1, 2))
    with client.create(others[:1], layout) as writer:
        for layer in range(2):
            writer[0].layer(layer)[...] = layer
    return {"client": client, "layout": layout, "keys": keys, "others": others, "pages": pages}


def choose(home):
    return {"name": home}


def engines(home):
    fake = types.ModuleType("tensorrt_llm.llmapi")  # TensorRT-LLM runs on GPUs only
    fake.KvCacheConnectorConfig = types.SimpleNamespace
    sys.modules["tensorrt_llm"] = sys.modules["tensorrt_llm.llmapi"] = fake
    return {}


def kernels(home):
    inputs = {"input_ids": torch.arange(40)[None] + 3}
    return {"model": build("llama"), "client": kvclient.connect(), "inputs": inputs}


def reuse(home):
    from kvclient.hf import Window

    return {"directory": home, "document": TEXT * 3, "question": "How many?", "Window": Window}


def streaming(home):
    from kvclient.hf import Engine
    from kvclient.hf.streaming import streaming_stats

    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    inputs = tokenizer(TEXT, return_tensors="pt")
    return {"Engine": Engine, "streaming_stats": streaming_stats, "small_model": build("llama"),
            "prompt": TEXT, "inputs": inputs, "ids": inputs["input_ids"]}  # fmt: skip


def tour(home):
    client = kvclient.connect()
    layout = kvclient.Layout(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32", block_tokens=16)
    chain = kvclient.chain(bytes(32), list(range(32)), block_tokens=16)
    values = np.ones((2, 1, 16, 16), np.float32)
    return {"client": client, "layout_id": client.register_layout(layout), "chain": chain, "values": values}


def held_after_the_readme(names):
    assert not names["kv"].last.bypassed and names["output"].shape[1] > 64


def held_after_choosing(names):
    assert names["blocks"].hits == 7


def held_after_the_c_api(names):
    assert names["blocks"].hits == 1 and len(names["places"]) == 2
    assert names["client"].lookup(names["keys"]).resident == 0, "given back"


def held_after_the_engines(names):
    connector = names["connector"]
    source = Path(importlib.util.find_spec(connector.connector_module).origin).read_text()  # it needs a GPU
    (line,) = re.findall(r"^__all__ = (.*)$", source, re.MULTILINE)
    both = {connector.connector_scheduler_class, connector.connector_worker_class}
    assert both == set(ast.literal_eval(line))


GIVEN = {"README.md": readme, "c-api.md": c_api, "choose.md": choose, "engines.md": engines,
         "kernels.md": kernels, "reuse.md": reuse, "streaming.md": streaming, "tour.md": tour}  # fmt: skip
HELD = {
    "README.md": held_after_the_readme,
    "c-api.md": held_after_the_c_api,
    "choose.md": held_after_choosing,
    "engines.md": held_after_the_engines,
}


@pytest.mark.parametrize("page", [page for page, _ in PYTHON], ids=lambda page: page.name)
def test_python_runs_as_it_stands(page, served, home, monkeypatch):
    torch.manual_seed(0)
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi"):
        monkeypatch.setitem(sys.modules, name, None)  # put back after the test, whoever replaced it
    names = {"kvclient": kvclient, **GIVEN[page.name](str(home))}
    for line, code in blocks(page, "python"):
        code = "\n" * (line - 1) + code.replace('"DIR"', repr(str(home)))
        exec(compile(code, str(page), "exec"), names)
    HELD.get(page.name, lambda names: None)(names)


# ---------------------------------------------------------------- other languages

OTHERS = [(ROOT / "docs" / name, language) for name, language in
          (("serving.md", "console"), ("tenants.md", "toml"), ("c-api.md", "c"))]  # fmt: skip


def test_the_servers_lines_are_taken_by_its_programs(home):
    from kvclient.serve.__main__ import parser
    from kvclient.serve.route import command
    from kvstored.cli.main import parser as daemons

    seen = set()
    for _, text in blocks(ROOT / "docs/serving.md", "console"):
        for line in (line[2:] for line in text.splitlines() if line.startswith("$ ")):
            program, *words = shlex.split(line.removesuffix(" &"))
            seen.add(" ".join([program, *words[: words == ["route"]]]))
            if program == "kvclient-serve" and words[0] == "route":
                assert command.parser().parse_args(words[1:])
            elif program in ("kvclient-serve", "kvstored"):
                assert (parser if program == "kvclient-serve" else daemons)().parse_args(words)
            else:
                assert (program, words[0]) == ("pip", "install")
    assert {"kvclient-serve", "kvstored", "pip"} == seen


def test_the_daemon_takes_the_file_of_its_tenants(tmp_path):
    from kvstored.config.sources import load

    (text,) = (text for _, text in blocks(ROOT / "docs/tenants.md", "toml"))
    (tmp_path / "kvstored.toml").write_text(text)
    config = load({"dir": "/tmp/x"}, {}, str(tmp_path / "kvstored.toml")).config
    assert {"default", "batch"} <= {namespace.name for namespace in config.namespaces}


def test_a_compiler_takes_the_c(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    (text,) = (text for _, text in blocks(ROOT / "docs/c-api.md", "c"))
    include, _, body = text.partition("\n")
    (tmp_path / "page.c").write_text(
        f"{include}\nint fail(const char *);\nvoid fill(kvs_writer *, size_t);\n"
        f"int page(const kvs_key *keys, size_t count) {{\n{body}return 0;\n}}\n"
    )
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", str(ROOT / "native/include")]
    done = subprocess.run(
        ["gcc", *strict, "page.c"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
