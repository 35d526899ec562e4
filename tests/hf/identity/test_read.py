"""Goal: two processes whose code reads different values never share KV, wherever the values lie; and what the
passes only note down there is no change.

Method: a user's file with one layer, whose factor is read from one place (an object, a container, a class, a
function's own attribute, an import within a function), changed while attached and before an attachment that
knows nothing of another; linear layers that are no part of the model. On the in-memory fake.
"""

import sys
import types
from functools import partial

import numpy as np
import pytest
import torch
import transformers

import kvclient.hf
from tests.hf.zoo import build, generate, prompt

OPTIONS = {"block_tokens": 16, "self_test": False, "in_place": False}


def reused(model, client):
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, prompt(70), 1)
        return kv.last.reused_tokens


READING = """
import enum, functools
from types import SimpleNamespace
import numpy as np
import torch

class Tool:
    def __init__(self, factor):
        self.factor = factor
    def told(self):
        return self.factor
    def __get__(self, holder, kind=None):
        return self.factor

class Never(torch.nn.Module):  # in the model
    @staticmethod
    def shared():
        return 1.0
    def forward(self, x):
        return x * 1.0

class Choice(enum.Enum):
    USUAL = 1.0

class Reading(torch.nn.Module):
    desc = Tool(1.0)

    def __init__(self, inner):
        super().__init__()
        self.inner, self.tool, self._private, self.array = inner, Tool(1.0), lambda: 1.0, np.ones(1)
        self.functions, self.by_name, self.plain = [lambda: 1.0], {"a": Tool(1.0)}, 1.0
        self.eval()

    def own(self):
        return 1.0

    def forward(self, x):
        return self.inner(x) * factor(self, x)

TOOL, SPACE, ARRAY, NUMBER = Tool(1.0), SimpleNamespace(factor=1.0), np.ones(1), np.float64(1.0)

def remembering():
    return REMEMBERED

REMEMBERED, remembers = 1.0, functools.lru_cache(remembering)

def noted():
    return noted.scale

noted.scale = 1.0

def defaulted(factors=[1.0], *, by_name={"a": 1.0}):
    return factors[0] * by_name["a"]

def imports():
    import beside
    return beside.factor()

def imports_from():
    from beside import FACTOR
    return FACTOR

def factor(layer, x):
    return FORMULA
"""
READ = {  # what the code reads, and who changes it
    "layer.tool.factor": lambda code, layer: setattr(layer.tool, "factor", 0.5),
    "layer.tool.told()": lambda code, layer: setattr(code.Tool, "told", lambda self: 0.5),
    "layer.by_name['a'].factor": lambda code, layer: setattr(layer.by_name["a"], "factor", 0.5),
    "layer._private()": lambda code, layer: setattr(layer, "_private", lambda: 0.5),
    "layer.functions[0]()": lambda code, layer: layer.functions.__setitem__(0, lambda: 0.5),
    "layer.array[0].item()": lambda code, layer: layer.array.__setitem__(0, 0.5),
    "layer.desc": lambda code, layer: setattr(code.Reading, "desc", code.Tool(0.5)),
    "getattr(layer, 'own')()": lambda code, layer: setattr(code.Reading, "own", lambda self: 0.5),
    "TOOL.factor": lambda code, layer: setattr(code.TOOL, "factor", 0.5),
    "SPACE.factor": lambda code, layer: setattr(code.SPACE, "factor", 0.5),
    "ARRAY[0].item()": lambda code, layer: code.ARRAY.__setitem__(0, 0.5),
    "float(NUMBER)": lambda code, layer: setattr(code, "NUMBER", np.float64(0.5)),
    "Choice.USUAL.value": lambda code, layer: code.Choice.USUAL.__dict__.update(_value_=0.5),
    "remembers()": lambda code, layer: (setattr(code, "REMEMBERED", 0.5), code.remembers.cache_clear()),
    "noted()": lambda code, layer: setattr(code.noted, "scale", 0.5),
    "defaulted()": lambda code, layer: code.defaulted.__defaults__[0].__setitem__(0, 0.5),
    "1.0 * defaulted()": lambda code, layer: code.defaulted.__kwdefaults__["by_name"].update(a=0.5),
    "imports()": lambda code, layer: setattr(sys.modules["beside"], "factor", lambda: 0.5),
    "imports_from()": lambda code, layer: setattr(sys.modules["beside"], "FACTOR", 0.5),
    "Never.shared()": lambda code, layer: setattr(code.Never, "shared", staticmethod(lambda: 0.5)),
    "Never()(1.0)": lambda code, layer: setattr(code.Never, "forward", lambda self, x: x * 0.5),
    "1.0": lambda code, layer: setattr(code.Reading, "__call__", lambda self, x: 0.5 * self.forward(x)),
    "globals()['REMEMBERED']": lambda code, layer: setattr(code, "REMEMBERED", 0.5),
}


def reading(monkeypatch, formula):
    """A user's file, and a model with a layer of it."""
    code, beside, model = types.ModuleType("reading"), types.ModuleType("beside"), build("llama", layers=2)
    monkeypatch.setitem(sys.modules, "reading", code)
    monkeypatch.setitem(sys.modules, "beside", beside)
    exec("FACTOR = 1.0\ndef factor(): return 1.0", beside.__dict__)
    exec(READING.replace("FORMULA", formula), code.__dict__)
    layer = model.model.layers[0].mlp = code.Reading(model.model.layers[0].mlp)
    return code, model, layer


@pytest.mark.parametrize("formula", READ)
def test_whatever_code_reads_is_of_the_identity_and_watched(client, monkeypatch, formula):
    """As a process has it that was never another one, too."""
    code, model, layer = reading(monkeypatch, formula)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        before = generate(model, prompt(70), 4)[1]
        generate(model, prompt(70), 1)
        first = kv.identity
        assert kv.last.reused_tokens == 64
        READ[formula](code, layer)
        after = generate(model, prompt(70), 4)[1]
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0)
        second = kv.identity
        assert second != first
    assert not torch.equal(before, after), "the change is one"
    assert torch.equal(generate(model, prompt(70), 4)[1], after)
    code, model, layer = reading(monkeypatch, formula)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        assert kv.identity == first
    READ[formula](code, layer)
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        assert kv.identity == second


def test_an_attribute_of_the_model_itself_that_its_code_reads_counts(client):
    model = build("llama", layers=2)
    model.__class__ = Factored
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        generate(model, prompt(70), 1)
        model.factor = 0.5
        generate(model, prompt(70), 1)
        assert kv.last.reused_tokens == 0
    assert reused(model, client) == 64


class Factored(transformers.LlamaForCausalLM):
    factor = 1.0

    def forward(self, input_ids=None, **kwargs):
        return super().forward(inputs_embeds=self.model.embed_tokens(input_ids) * self.factor, **kwargs)


class Counter:
    def __init__(self):
        self.calls, self.seen = 0, []

    def note(self, x):
        self.calls += 1
        self.seen.append(x.shape)


COUNTER = Counter()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v3"])
def test_what_an_object_counts_is_no_change(client, monkeypatch, name):
    """Whatever the layers keep: neither examined at each call, nor of the identity."""
    model, tool = build(name), Counter()
    kind = type(model.model.layers[0])
    original = kind.forward

    def forward(self, hidden_states, *args, **kwargs):
        tool.note(hidden_states)
        COUNTER.note(hidden_states)
        return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    options = OPTIONS | {"in_place": None}
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, prompt(70), 1)
        with monkeypatch.context() as patch:
            patch.setattr(kv._model_state, "examine", None)
            generate(model, prompt(70), 3)
        assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 64)
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, prompt(70), 1)
        assert kv.last.reused_tokens == 64


class Holder:
    def __init__(self, module):
        self.module = module


HIDDEN = {  # where a module that no state_dict has is kept, and how the layer comes to it
    "a list": (lambda layer, hidden: layer.__dict__.update(held=[hidden]), lambda self: self.held[0]),
    "an object": (
        lambda layer, hidden: setattr(layer, "held", Holder(hidden)),
        lambda self: self.held.module,
    ),
    "its dict": (lambda layer, hidden: layer.__dict__.update(_held=hidden), lambda self: self._held),
    "a method": (lambda layer, hidden: setattr(layer, "held", hidden.forward), lambda self: self.held),
    "a partial": (lambda layer, hidden: setattr(layer, "held", partial(hidden)), lambda self: self.held),
    "a closure": (lambda layer, hidden: None, None),
}


@pytest.mark.parametrize("place", HIDDEN)
def test_weights_that_hide_are_of_the_identity_and_watched(client, monkeypatch, place):
    """A linear layer of 48 by 48 that is no part of the model but runs in its pass."""
    put, taken = HIDDEN[place]

    def hiding(weight):
        model, hidden = build("llama", layers=2), torch.nn.Linear(48, 48, bias=False).requires_grad_(False)
        hidden.weight.fill_(weight)
        layer = model.model.layers[0].mlp
        put(layer, hidden)
        take = taken or (lambda self: hidden)
        layer.__class__ = type("Hiding", (type(layer),), {"forward": with_hidden(type(layer).forward, take)})
        return model, hidden

    model, hidden = hiding(0.0)
    assert reused(model, client) == 0
    assert reused(hiding(0.0)[0], client) == 64
    assert reused(hiding(0.05)[0], client) == 0
    with kvclient.hf.attach(model, client, **OPTIONS) as kv:
        for write in (lambda: hidden.weight.add_(0.1), lambda: hidden.weight.data.numpy().fill(0.2)):
            generate(model, prompt(70), 1)
            write()
            generate(model, prompt(70), 1)
            assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 0)


def with_hidden(forward, take):
    return lambda self, x: forward(self, x) + take(self)(x)
