"""Goal: what attach() proved of a model is proven once on a machine: a second process makes no pass for it. A
model, or a library, that is another one is proven again; so is one whose file is damaged.

Method: forward passes are counted, in processes of their own, on a tiny random model and a directory of the
test's own.
"""

import json
import os
import sys
from pathlib import Path

import pytest

import kvclient.hf
from kvclient.hf.proof import self_test, verdicts
from tests.hf.zoo import build, generate, prompt
from tests.warm_python import run as run_warm

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
import torch
import kvclient, kvclient.hf
from tests.hf.zoo import build, generate, prompt

def attach(case):
    model = build("llama", layers=2)
    if case == "other weights":
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    if case == "other code":
        def forward(self, x):
            return self.down_proj(1.0 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        forward.__globals__["__name__"] = "mine"
        type(model.model.layers[0].mlp).forward = forward
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(0))
    model._forward_pre_hooks[next(iter(model._forward_pre_hooks))].__module__ = "kvclient.test"
    kv = kvclient.hf.attach(model, kvclient.InMemoryClient(64 << 20), block_tokens=8)
    print(len(passes), kv.backend, kv.padded, flush=True)

for case in sys.argv[1:]:  # a process each, which has imported and not yet done anything
    if (child := os.fork()) == 0:
        attach(case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def attached(*cases: str) -> list[int]:
    """Passes that attach() made, each in a process of its own, one after the other."""
    command = [sys.executable, "-c", PROGRAM, *cases]
    done = run_warm(command, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert all(padded == "True" and backend for _, backend, padded in rows)
    return [int(passes) for passes, *_ in rows]


@pytest.mark.usefixtures("verdicts")
def test_a_second_process_proves_nothing_again():
    first, second, other_weights, other_code = attached("same", "same", "other weights", "other code")
    assert first >= 8
    assert second <= 2, "to see the shape of its KV"
    assert other_weights >= 6, "the self-test; the kernels know no weights"
    assert other_code == first


def test_a_damaged_file_counts_as_none(client, verdicts, monkeypatch):
    model = build("llama", layers=2)
    kvclient.hf.attach(model, client, block_tokens=8).detach()
    files = sorted(verdicts.glob("*.json"))
    assert len(files) == 2
    runs = []
    monkeypatch.setattr(self_test, "prove_model", lambda *_: runs.append(0) or self_test.Verdict(True, 0.0))
    kvclient.hf.attach(model, client, block_tokens=8).detach()
    assert not runs
    kept = json.loads(files[0].read_text())
    others = [json.dumps({**kept, **other}) for other in ({"version": 0}, {"key": "0" * 64})]
    for text in ("", "{", "[]", "null", *others):
        for file in files:
            file.write_text(text)
        kvclient.hf.attach(model, client, block_tokens=8).detach()
        assert runs.pop() == 0 and not runs
    wrong = {"padded": "yes", "difference": None}
    for file in files:
        file.write_text(json.dumps({**json.loads(file.read_text()), "found": wrong}))
    with kvclient.hf.attach(model, client, block_tokens=8) as kv:
        assert runs.pop() == 0 and kv.padded is True
        generate(model, prompt(20), 1)


def test_a_refusal_is_not_kept(client, verdicts, monkeypatch):
    model = build("llama", layers=2)

    def refuse(*_):
        raise kvclient.hf.Refused("wrong")

    with monkeypatch.context() as patch, pytest.raises(kvclient.hf.Refused, match="wrong"):
        patch.setattr(self_test, "prove_model", refuse)
        kvclient.hf.attach(model, client, block_tokens=8, in_place=False)
    assert not list(verdicts.glob("*.json"))
    kvclient.hf.attach(model, client, block_tokens=8, in_place=False).detach()


def without_a_home(patch):
    """As in a container, under a number that no user has."""
    for name in (verdicts.PLACE, "KVCLIENT_CALIBRATION_DIR", "XDG_CACHE_HOME", "HOME"):
        patch.delenv(name, raising=False)
    patch.setattr(os, "getuid", lambda: 54321)


CLOSED = [lambda patch: patch.setenv(verdicts.PLACE, "/proc/kvstored-test"), without_a_home]


@pytest.mark.usefixtures("verdicts")
@pytest.mark.parametrize("close", CLOSED)
def test_where_nothing_can_be_kept_it_is_proven_again(client, monkeypatch, close):
    close(monkeypatch)
    model = build("llama", layers=2)
    for _ in range(2):
        kvclient.hf.attach(model, client, block_tokens=8).detach()


@pytest.mark.usefixtures("verdicts")
def test_old_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "MOST_FILES", 3)
    names = [verdicts.key("test", [number]) for number in range(5)]
    for name in names:
        verdicts.save(name, {"number": 1})
    assert len(list(verdicts.directory().glob("*.json"))) == 3
    assert verdicts.load(names[-1]) == {"number": 1} and verdicts.load(names[0]) is None
