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
import types

import pytest
import torch

import kvclient.hf
from kvclient.hf.model.code import Code
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


@pytest.mark.slow  # 7 s of imports; a server of serve/test_http.py has a hash seed of its own, too
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


HELPER = "def factor(x): return 1.0"
WRITTEN = """
import torch

class Base(torch.nn.Module):
    def forward(self, x):
        return self.inner(x) * self.own()

class Above(torch.nn.Module):
    def forward(self, x):
        return self.inner(x)

class Scaled(Above):
    SCALE, SCALES = 1.0, [1.0]

    def __init__(self, inner):
        super().__init__()
        self.inner, self.pair, self.by_name, self._private = inner, (1.0,), {"a": 1.0}, 1.0
        self.eval()

    @property
    def told(self):
        return 1.0

    def forward(self, x):
        factor = self.SCALE * self.SCALES[0] * self.told * self.pair[0] * self.by_name["a"] * self._private
        factor *= package.helper.factor(x) * Tool.shared() * Tool().alone()
        factor *= LIST[0] * PAIR[0] * BY_NAME["a"] * float(ONE)
        return super().forward(x) * factor

class First(Base):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.eval()

    def own(self):
        return 1.0

class Second(First):
    def own(self):
        return 1.0

class Tool:
    FACTOR = 1.0

    @staticmethod
    def shared():
        return 1.0

    def alone(self):
        return self.FACTOR

LIST, PAIR, BY_NAME, ONE = [1.0], (1.0,), {"a": 1.0}, torch.ones(1)
"""


def half(*_args):
    return 0.5


@pytest.fixture
def code(model, monkeypatch):
    """A user's file, three of whose layers are in the model."""
    written, helper = types.ModuleType("written"), types.ModuleType("helper")
    exec(HELPER, helper.__dict__)
    monkeypatch.setitem(sys.modules, "written", written)
    written.package = types.ModuleType("package")
    written.package.helper, written.package.package = helper, written.package
    exec(WRITTEN, written.__dict__)
    first, second = model.model.layers
    first.mlp, second.mlp = written.Scaled(written.First(first.mlp)), written.Second(second.mlp)
    return written


EDITS = {
    "a number of a class": lambda code, model: (code.Scaled, "SCALE", 0.5),
    "a list of a class": lambda code, model: (code.Scaled, "SCALES", [0.5]),
    "a property": lambda code, model: (code.Scaled, "told", property(half)),
    "a method by super()": lambda code, model: (code.Above, "forward", lambda self, x: self.inner(x) * 0.5),
    "a method of the second class with one forward": lambda code, model: (code.Second, "own", half),
    "a function of a module": lambda code, model: (code.package.helper, "factor", half),
    "a function of a class": lambda code, model: (code.Tool, "shared", staticmethod(half)),
    "a method of a class that is no layer": lambda code, model: (code.Tool, "alone", half),
    "a number of a class that is no layer": lambda code, model: (code.Tool, "FACTOR", 0.5),
    "a list of the file": lambda code, model: (code, "LIST", [0.5]),
    "a tuple of the file": lambda code, model: (code, "PAIR", (0.5,)),
    "a dict of the file": lambda code, model: (code, "BY_NAME", {"a": 0.5}),
    "a tensor of the file": lambda code, model: (code, "ONE", torch.full((1,), 0.5)),
    "a tuple of a layer": lambda code, model: (model.model.layers[0].mlp, "pair", (0.5,)),
    "a dict of a layer": lambda code, model: (model.model.layers[0].mlp, "by_name", {"a": 0.5}),
    "what a layer calls private": lambda code, model: (model.model.layers[0].mlp, "_private", 0.5),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_code_reaches_is_of_the_identity(model, code, client, edit):
    """Edited between two calls it is noticed; edited back, what was published before is found."""
    ids = prompt(70)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, ids, 1)
        first = kv.identity
        holder, name, value = EDITS[edit](code, model)
        before = vars(holder)[name]
        setattr(holder, name, value)
        said, _, _ = generate(model, ids, 4)
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0)
        assert kv.identity != first
        with kv.bypass():
            assert torch.equal(said, generate(model, ids, 4)[0])
        setattr(holder, name, before)
        generate(model, ids, 1)
        assert kv.identity == first and kv.last.reused_tokens >= 64


def test_a_list_that_is_written_in_place_is_noticed(model, code, client):
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(70), 1)
        code.LIST[0] = 0.5
        generate(model, prompt(70), 1)
        assert kv.last.reused_tokens == 0


def test_another_attention_and_masks_under_one_name_are_noticed(model, client):
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks = getattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def halved(*args, **kwargs):
        return usual(*args, **kwargs)[0] * 0.5, None

    ALL_ATTENTION_FUNCTIONS.register("users", lambda *args, **kwargs: usual(*args, **kwargs))
    if masks is not None:
        masks.register("users", masks["sdpa"])
    model.config._attn_implementation = "users"
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        generate(model, prompt(70), 1)
        first = kv.identity
        ALL_ATTENTION_FUNCTIONS.register("users", halved)
        generate(model, prompt(70), 1)
        second = kv.identity
        assert kv.last.reused_tokens == 0 and second != first
        if masks is not None:
            masks.register("users", lambda *args, **kwargs: masks["sdpa"](*args, **kwargs))
            generate(model, prompt(70), 1)
            assert kv.last.reused_tokens == 0 and kv.identity not in (first, second)
            masks.register("users", lambda *args, **kwargs: None)  # of a prefix too: not what a prompt has
            generate(model, prompt(70), 1)
            assert kv.last.bypassed == "refused"


def test_a_hook_of_accelerates_that_is_not_its_own_is_refused(model, client):
    hooks = pytest.importorskip("accelerate.hooks")

    class Halved(hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 0.5

    mlp = model.model.layers[1].mlp
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, self_test=False) as kv:
        hooks.add_hook_to_module(mlp, hooks.AlignDevicesHook(execution_device="cpu"))
        generate(model, prompt(70), 1)
        assert kv.last.bypassed is None
        hooks.add_hook_to_module(mlp, Halved(), append=True)
        generate(model, prompt(70), 1)
        assert kv.last.bypassed == "refused" and "Halved" in kv.last.bypass_detail
        hooks.remove_hook_from_module(mlp)
        generate(model, prompt(70), 1)
        assert kv.last.bypassed is None


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        lambda: torch.ones(3).to_mkldnn(),
    ],
)
def test_a_tensor_that_has_no_plain_numbers_ends_no_attach(model, monkeypatch, made):
    before, held = type(model.model.layers[0].mlp).forward, made()
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: held and before(self, x))
    assert len(Code(model).digest) == 32
