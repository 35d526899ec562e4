"""Goal: KV of a model whose code was edited is never served to one whose code was not, in no direction.

Method: two processes with the same weights on one daemon, one of them with one edit (a custom module's
forward, a method of a class, a function of the modeling file, a closure, a default); it must miss what the
other published, and answer as it answers without the store. The same in a living process between two calls,
and writes that torch does not count. Controls: no edit hits; another hash seed hits.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import kvclient.hf
from tests.conftest import ROOT
from tests.hf.zoo import build, generate, prompt
from tests.warm_python import WarmPython

BLOCK = 16
PROGRAM = """
import json, sys
import torch
import kvclient, kvclient.hf
from transformers.models.llama import modeling_llama as code
from tests.hf.zoo import build, generate, prompt

class Scale(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.eval()
    def forward(self, x):
        return FORMULA

def closed(factor):
    return lambda x: torch.nn.functional.silu(x) * factor

def defaulted(x, factor=DEFAULT):
    return torch.nn.functional.silu(x) * factor

def halved(forward):
    return lambda self, x: 0.5 * forward(self, x)

def turned(rotate):
    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        q, k = rotate(q, k, cos, sin, *args, **kwargs)
        return q, k * 0.5
    return apply_rotary_pos_emb

def run(edit):
    model = build("llama", layers=2)
    for layer in model.model.layers:
        layer.self_attn.o_proj = Scale(layer.self_attn.o_proj)
        if edit in ("closure", "other closure", "default"):
            del layer.mlp.act_fn  # a module: in its place a plain function
            made = {"closure": closed(1.0), "other closure": closed(0.5), "default": defaulted}
            layer.mlp.act_fn = made[edit]
    if edit == "method":
        code.LlamaMLP.forward = halved(FORWARD)
    if edit == "function":
        code.apply_rotary_pos_emb = turned(ROTATE)
    ids = prompt(70)
    plain = generate(model, ids, 4)[0].tolist()
    with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
        said = generate(model, ids, 4)[0].tolist()
        print(json.dumps([kv.last.reused_tokens, said == plain, kv.last.published_blocks, kv.identity.hex()]))
    code.LlamaMLP.forward, code.apply_rotary_pos_emb = FORWARD, ROTATE

FORWARD, ROTATE = code.LlamaMLP.forward, code.apply_rotary_pos_emb
with kvclient.connect(sys.argv[1]) as client:
    for edit in sys.argv[2:]:
        run(edit)
"""


IN_TURN = """
import json, os, sys
import torch
import kvclient, kvclient.hf
import transformers.models.llama.modeling_llama
import tests.hf.zoo

directory = sys.argv[1]
for program, edits in json.load(sys.stdin):  # a process each, which has imported and not yet done anything
    if (child := os.fork()) == 0:
        sys.argv[1:] = [directory, *edits]
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, edits
"""


def program(formula="1.0 * self.inner(x)", default="1.0"):
    return PROGRAM.replace("FORMULA", formula).replace("DEFAULT", default)


def run(daemon, *programs, python=WarmPython, **env):
    """Of each edit of each program, a process for each program, in turn: tokens reused, whether the answer is
    right, blocks published, the identity."""
    process = python(
        [sys.executable, "-c", IN_TURN, str(daemon.dir)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    said, errors = process.communicate(json.dumps(programs), timeout=300)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in said.splitlines()]


def test_an_edit_misses_what_the_unedited_published(daemon):
    """A method of a class, a function of the file, a closure; and, in a program that differs in one number, a
    formula and a default."""
    unedited = [(program(), ["same", "closure", "default"])]
    edited = [
        (program(), ["method", "function", "other closure"]),
        (program(formula="0.5 * self.inner(x)"), ["same"]),
        (program(default="0.5"), ["default"]),
    ]
    found = run(daemon("64MiB"), *unedited, *edited)
    assert [(reused, right) for reused, right, *_ in found] == [(0, True)] * 8
    assert all(published >= 4 for *_, published, _ in found[:3])
    identities = [identity for *_, identity in found]
    assert len(set(identities)) == 8, identities


def test_the_same_code_hits_in_another_process_with_another_hash_seed(daemon):
    served = daemon("64MiB")
    [[*_, before]] = run(served, (program(), ["closure"]))
    there = {"python": subprocess.Popen, "PYTHONHASHSEED": "2"}
    [[reused, right, _, after]] = run(served, (program(), ["closure"]), **there)
    assert before == after
    assert right and reused >= 64


@pytest.fixture
def model():
    return build("llama", layers=2)


def halved(model, patch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    before = LlamaMLP.forward
    patch.setattr(LlamaMLP, "forward", lambda self, x: 0.5 * before(self, x))


def activation(model, patch):
    patch.setattr(model.model.layers[0].mlp, "act_fn", Activation(0.5))


def file_function(model, patch):
    from transformers.models.llama import modeling_llama

    before = modeling_llama.rotate_half
    patch.setattr(modeling_llama, "rotate_half", lambda x: -before(x))


def data(model, patch):
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(0.5)


def numpy_memory(model, patch):
    model.model.layers[1].self_attn.k_proj.weight.detach().numpy()[:] *= 0.5


class Activation(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.eval()

    def forward(self, x):
        return torch.nn.functional.silu(x) * self.factor


@pytest.mark.parametrize("edit", [halved, activation, file_function, data, numpy_memory])
def test_an_edit_between_two_calls_is_noticed(model, client, monkeypatch, edit):
    """By a publisher: what it publishes afterwards is under another identity."""
    ids = prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, ids, 1)
        before, blocks = kv.identity, kv.last.published_blocks
        generate(model, ids, 1)
        assert kv.last.reused_tokens >= 64 and blocks >= 4
        edit(model, monkeypatch)
        said = generate(model, ids, 4)[0]
        assert kv.last.bypassed is None and kv.last.reused_tokens == 0
        assert kv.identity != before
    assert torch.equal(said, generate(model, ids, 4)[0])
