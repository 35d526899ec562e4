"""Proves that KVK_CPU_PATH, the CPU library's own choice, is followed by models too; a wrong one is said.

Method: the choice is made once in a process, so children are asked; for machines that this one is not, the
library's answers are replaced.
"""

import subprocess
import sys

import torch

from kvclient.hf import attention
from kvclient.hf.attention import backends
from kvclient.kernels import contract
from tests.warm_python import run as run_warm


def test_the_native_path_can_be_forced_from_outside():
    code = "from kvclient import kernels; print(kernels.auto_path())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"KVK_CPU_PATH": "reference", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "reference", done.stderr


def test_a_native_path_that_cannot_be_had_is_an_error_that_names_it():
    """A child for each, forked behind the imports: the choice is made once in a process."""
    names = [name for name in ("avx1024", "amx", "") if name != "amx" or contract.lacks("amx")]
    code = """
import os, sys, torch
from kvclient.errors import InvalidArgument
from kvclient.hf.attention import backends
for name in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["KVK_CPU_PATH"] = name
        try:
            backends.choose(torch.device("cpu"), torch.float32, 64)
        except InvalidArgument as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""
    done = run_warm([sys.executable, "-c", code, *names], env={"PYTHONPATH": "."}, timeout=120)
    said = done.stdout.splitlines()
    assert len(said) == len(names), done.stderr
    for name, line in zip(names, said, strict=True):
        assert line.startswith(f"KVK_CPU_PATH={name}: "), line


PATHS = (
    ("avx2", "cpu_avx2"), ("avx512", "cpu_avx512"), ("amx", "cpu_amx"), ("reference", "cpu_reference"),
)  # fmt: skip


def test_a_native_path_from_outside_decides_which_backend_is_chosen(monkeypatch):
    """KVK_CPU_PATH=avx2 where there is AVX-512: not named avx512, and not computed by it."""
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    monkeypatch.setattr(contract, "lacks", lambda name: None)
    cpu = torch.device("cpu")
    for path, name in PATHS:
        monkeypatch.setenv(backends.PATH, path)
        monkeypatch.setattr(contract, "auto_path", lambda path=path: path)
        chosen = backends.choose(cpu, torch.float32, 64)
        assert (chosen.name, chosen.path) == (name, contract.path_number(path))


def test_the_naive_path_computes_a_model_if_it_is_named_and_never_else(monkeypatch):
    """In a child: what it is attached with is what KVK_CPU_PATH says, and says what the model says."""
    monkeypatch.delenv(backends.PATH, raising=False)
    assert "reference" not in backends.choose(torch.device("cpu"), torch.float32, 64).name
    code = """
import torch, kvclient, kvclient.hf
from tests.hf.zoo import generate, known, near, prompt
model, ids = known("llama"), prompt(61)
plain, logits, _ = generate(model, ids)
with kvclient.InMemoryClient(8 << 20) as client:
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
        for _ in range(2):
            tokens, found, _ = generate(model, ids)
        print(kv.backend, kv.last.reused_tokens, torch.equal(tokens, plain), near(found, logits))
"""
    env = {"KVK_CPU_PATH": "reference", "PYTHONPATH": "."}
    done = run_warm([sys.executable, "-c", code], env=env, timeout=120)
    assert done.stdout.split() == ["cpu_reference", "48", "True", "True"], done.stderr


def test_a_native_path_that_there_is_not_is_the_reason_of_every_cpu_backend(monkeypatch):
    lacks = contract.lacks
    monkeypatch.setattr(contract, "lacks", lambda name: "KVK_CPU_PATH=x" if name == "auto" else lacks(name))
    found = attention.available_backends()
    assert all(found[name] is not None for name in ("cpu_amx", "cpu_avx512", "cpu_avx2"))
    assert found["torch"] is None
