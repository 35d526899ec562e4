"""Proves that a step of one token that a model's body computes as one has the bits of its layers one by one,
logits and cache, whatever is done to the cache, the model or the call in between; that tensors which were
handed out keep their numbers; and that a body that computes otherwise is left to its class.

Method: tiny models of Llama's, Qwen's and Mistral's kind, plain and packed, beside themselves with the same
layers but without the body's forward.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from kvclient.hf import awq, layers
from kvclient.hf.attention import switch
from kvclient.hf.layers import appended, kinds, stack
from kvclient.hf.release import CACHE
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.layers.test_decoder import made
from tests.hf.zoo import prompt

pytestmark = pytest.mark.skipif(
    not appended.known() or kinds.model(made().model) is None, reason="this release's bodies are torch's"
)
KINDS = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": None}}
TOKENS = 90  # beyond the room that a cache of ten has at first


@pytest.fixture
def steps(monkeypatch):
    """A list, with one entry more for each step that was computed as one."""
    usual, seen = stack.Step.__call__, []
    monkeypatch.setattr(stack.Step, "__call__", lambda *args: seen.append(1) or usual(*args))
    return seen


def both(dtype=torch.float32, kind="llama"):
    """(with the body's forward, with the layers' alone)."""
    model = made(kind, dtype, **KINDS[kind])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        assert layers.install(each)
        switch.install(each)
    del twin.model.__dict__["forward"]
    return model, twin


def generated(model, tokens=TOKENS):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    return model.generate(
        prompt(10), max_new_tokens=tokens, return_dict_in_generate=True, **options
    )


def equal_caches(found, wanted):
    pairs = zip(found.layers, wanted.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


class Talk:
    """A model and a cache, fed token by token."""

    def __init__(self, model):
        self.model, self.cache = model, transformers.DynamicCache(config=model.config)
        self.say(prompt(10))

    @torch.no_grad()
    def say(self, ids, **told):
        return self.model(input_ids=ids, **{CACHE: self.cache}, **told).logits

    def one(self, **told):
        return self.say(torch.tensor([[7]]), **told)


def alike(first, second, **told):
    return torch.equal(first.one(**told), second.one(**told)) and equal_caches(first.cache, second.cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_caches_are_those_of_the_layers(kind, dtype, steps):
    model, twin = both(dtype, kind)
    tokens = TOKENS if kind == "llama" else 8
    for round in range(2):  # the first step of all is computed both ways
        found, wanted = generated(model, tokens), generated(twin, tokens)
        assert len(steps) == (round + 1) * (tokens - 1)
        assert torch.equal(found.sequences, wanted.sequences)
        assert all(map(torch.equal, found.logits, wanted.logits))
        assert equal_caches(getattr(found, CACHE), getattr(wanted, CACHE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_packed_layers_with_the_attention_of_one_query(tmp_path, kind, dtype, steps):
    """Qwen2's have biases, which somebody may write into, in a call under inference mode first."""
    home = write_checkpoint(tmp_path, made(kind, dtype), 32)
    model, twin = (awq.from_pretrained(home, dtype=dtype) for _ in range(2))
    assert layers.install(model) and layers.install(twin)
    del twin.model.__dict__["forward"]
    with torch.inference_mode():
        found, wanted = generated(model, 5), generated(twin, 5)
    assert len(steps) == 4 and all(map(torch.equal, found.logits, wanted.logits))
    for each in (model, twin):
        if (bias := each.model.layers[1].self_attn.v_proj.bias) is not None:
            bias.data.mul_(2)
    before, found, wanted = found, generated(model, 5), generated(twin, 5)
    assert len(steps) == 8 and all(map(torch.equal, found.logits, wanted.logits))
    assert all(map(torch.equal, found.logits, before.logits)) is (kind == "llama")


def _hook(model):
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 2)


def _weight(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data * 2


def _epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _norm(model):
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.data *= 2


def _swapped(model):
    model.model.layers = torch.nn.ModuleList([model.model.layers[1], model.model.layers[0]])


def _scaling(model):
    model.model.layers[0].self_attn.scaling = 0.5


def _eager(model):
    switch.uninstall(model)
    model.set_attn_implementation("eager")


def _reference(model):
    switch.uninstall(model)
    switch.install(model, "cpu_reference")


CHANGES = [_reference, _hook, _weight, _epsilon, _norm, _swapped, _scaling, _eager]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_is_changed_of_a_model_counts(change):
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks)
    before = talks[0].one()
    talks[1].one()
    for talk in talks:
        change(talk.model)
    assert alike(*talks)
    for talk in talks:
        talk.cache.crop(-2)
    assert not torch.equal(talks[0].one(), before)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_windows_that_are_set_afterwards_count(kind, steps):
    talks = [Talk(model) for model in both(kind=kind)]
    assert alike(*talks) and alike(*talks)
    steps.clear()
    for whose in ("itself", "configuration"):
        for talk in talks:
            if whose == "itself" and kind != "mistral":
                talk.model.model.layers[1].self_attn.sliding_window = 4
                continue
            types, talk.model.model.has_sliding_layers = ["full_attention", "sliding_attention"], True
            talk.model.config.update({"sliding_window": 4, "layer_types": types})
        assert alike(*talks) and not steps


def test_fewer_layers_than_there_are():
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks)
    for talk in talks:
        talk.model.config.num_hidden_layers = 1
    assert torch.equal(talks[0].one(), talks[1].one())
    assert [layer.get_seq_length() for layer in talks[0].cache.layers] == [13, 12]


def test_what_is_asked_for_counts(steps):
    """A mask that hides a token, places, hidden states, two tokens, two rows, embeddings."""
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks)
    steps.clear()
    hidden = torch.ones(1, 13, dtype=torch.int64)
    hidden[0, 3] = 0
    assert alike(*talks, attention_mask=hidden) and not steps
    assert alike(*talks, attention_mask=torch.ones(1, 14, dtype=torch.int64)) and len(steps) == 1
    assert alike(*talks, position_ids=torch.tensor([[40]])) and len(steps) == 2
    assert alike(*talks, use_cache=False) and len(steps) == 3
    steps.clear()
    ids = torch.tensor([[7]])
    for told in ({"input_ids": torch.tensor([[7, 8]])}, {"input_ids": ids, "output_hidden_states": True},
                 {"input_ids": ids, "return_dict": False}, {"inputs_embeds": torch.ones(1, 1, 64)},
                 {"input_ids": ids, "attention_mask": torch.ones(1, 99)}):  # fmt: skip
        outs = []
        for talk in talks:
            with torch.no_grad():
                try:
                    outs.append(talk.model(**told, **{CACHE: talk.cache})[0])
                except (ValueError, RuntimeError, IndexError) as error:
                    outs.append(torch.tensor([len(str(error))]))
        assert torch.equal(*outs) and not steps, told
    assert alike(*talks)
    steps.clear()
    with torch.enable_grad():
        out = talks[0].model(input_ids=ids, **{CACHE: talks[0].cache}).logits
    assert out.requires_grad and not steps


def test_tensors_that_were_handed_out_keep_their_numbers():
    """A cache that is cut back, copied or shared goes on beside what others hold of it."""
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks) and alike(*talks)
    cache = talks[0].cache
    held = [(layer.keys, layer.keys.clone()) for layer in cache.layers]
    deep, other = copy.deepcopy(cache), appended.beside(cache)
    for talk in talks:
        talk.cache.crop(-2)
    for _ in range(3):
        assert alike(*talks)
    assert all(torch.equal(now, was) for now, was in held)
    wanted = None
    for copied in (deep, other):  # both go on from the thirteenth token
        talks[0].cache = copied
        out = [talks[0].say(torch.tensor([[9]])), talks[0].say(torch.tensor([[3]]))]
        assert wanted is None or all(map(torch.equal, out, wanted))
        wanted = out
    assert all(torch.equal(now, was) for now, was in held)


def test_steps_in_and_outside_of_inference_mode():
    """A step's memory that was made in the mode could not be written outside of it."""
    model, twin = both()
    wanted = generated(twin, 4).sequences
    for mode in (True, False, True):
        with torch.inference_mode(mode), torch.no_grad():
            assert torch.equal(generated(model, 4).sequences, wanted)
    talk, other = Talk(model), Talk(twin)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert alike(talk, other)


def _doubled(keys):
    keys.data = keys.data * 2


def _set(keys):
    keys.set_(keys[:, :, 1:].clone())


def _strided(keys):
    keys.data = keys.data.as_strided(keys.shape, (*keys.stride()[:2], 0, 1))


def _negative(keys):
    keys.data = torch._neg_view(keys.data)


@pytest.mark.parametrize("change", [_doubled, _set, _strided, _negative, torch.Tensor.neg_])
def test_what_is_put_into_a_caches_tensors_counts(change):
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks)
    for talk in talks:
        for layer in talk.cache.layers:
            for side in (layer.keys, layer.values):
                change(side)
    assert alike(*talks) and alike(*talks)


def test_a_first_step_that_cannot_be_tried_is_answered_once(monkeypatch, steps):
    talks = [Talk(model) for model in both()]

    def refused(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(appended.Appended, "__init__", refused)
        assert alike(*talks)
    assert alike(*talks) and not steps


@pytest.mark.parametrize("whose", ["cache", "layer"])
def test_an_update_of_a_caches_own_is_asked(whose, steps):
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks)
    steps.clear()
    for talk in talks:
        changed = talk.cache if whose == "cache" else talk.cache.layers[1]
        usual = changed.update
        changed.update = lambda key, value, *more, usual=usual, **told: usual(key * 2, value, *more, **told)
    assert alike(*talks) and not steps


def test_a_cache_that_is_gone_takes_no_memory():
    talk = Talk(both()[0])
    talk.one(), talk.one()
    memory = weakref.ref(talk.cache.layers[0].keys._base)
    assert memory() is not None
    talk.cache = None
    gc.collect()
    assert memory() is None


def test_an_error_within_a_step_leaves_the_cache_as_it_was(monkeypatch):
    talks = [Talk(model) for model in both()]
    assert alike(*talks) and alike(*talks)
    usual, calls = stack.dense.run, []

    def fails(args):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        usual(args)

    with monkeypatch.context() as patched:
        patched.setattr(stack.dense, "run", fails)
        with pytest.raises(MemoryError):
            talks[0].one()
    assert [layer.get_seq_length() for layer in talks[0].cache.layers] == [12, 12]
    assert alike(*talks) and alike(*talks)


def test_memory_that_a_cache_outgrew_goes_at_once(monkeypatch):
    """Without a collection: each is as large as the answer was by then."""
    made, usual = [], appended.Appended.__init__

    def noted(self, *args):
        made.append(weakref.ref(self))
        usual(self, *args)

    monkeypatch.setattr(appended.Appended, "__init__", noted)
    talk = Talk(both()[0])
    gc.disable()
    try:
        for _ in range(TOKENS):
            talk.one()
        assert len(made) >= 3  # the trial's, and one that had no room any more
        assert sum(ref() is not None for ref in made) == 1
    finally:
        gc.enable()


def test_threads_with_caches_of_their_own(steps):
    model, twin = both()
    Talk(model).one()
    wanted, found = generated(twin, 40), [None] * 3
    ends = threading.Barrier(3)

    def run(number):
        ends.wait()
        found[number] = generated(model, 40)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(steps) == 1 + 3 * 39
    for each in found:
        assert all(map(torch.equal, each.logits, wanted.logits))
        assert equal_caches(getattr(each, CACHE), getattr(wanted, CACHE))


def test_a_body_that_computes_otherwise_is_found_out(monkeypatch, steps):
    """By its first step, which is computed both ways."""
    talks = [Talk(model) for model in both()]
    usual = stack.Step.__call__
    monkeypatch.setattr(stack.Step, "__call__", lambda *args: usual(*args).nextafter(torch.tensor(9.0)))
    for _ in range(3):
        assert alike(*talks)
    assert len(steps) == 1


def test_a_strangers_body_is_its_own(monkeypatch):
    usual = modeling_llama.LlamaModel.forward

    def forward(self, *args, **told):
        out = usual(self, *args, **told)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    model = made()
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama.LlamaModel, "forward", forward)
        assert layers.install(model) and "forward" not in model.model.__dict__
