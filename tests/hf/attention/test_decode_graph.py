"""Proves kv.decode_graph(): generate() over a tail that does not move, its step prepared once, says the same.

Method: on a CPU nothing records, so a step that is replayed runs again: over the same tensors, with the
length in a tensor, by the layers' own attention, which is all that a CUDA graph sees. That the step runs, and
how often, is counted. Recording by CUDA itself takes a GPU.
"""

import copy
import gc

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import attention
from kvclient.hf.cache.static import StaticLayer
from kvclient.hf.decoding import decode_step
from tests.hf.zoo import generate, known, near, prompt

BLOCK = 16
NAMES = ("llama", "qwen3", "gemma", "phi3", "gpt_neox", "gpt2", "llama_yarn", "smollm3")


@pytest.fixture
def steps(monkeypatch):
    """How often a step was recorded and replayed."""
    counts = {"recorded": 0, "replayed": 0}
    recorder = decode_step.record_nothing

    def record(run):
        counts["recorded"] += 1
        replay, out = recorder(run)

        def counted():
            counts["replayed"] += 1
            replay()

        return counted, out

    monkeypatch.setattr(decode_step, "record_nothing", record)
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_generation(name, client, steps, left):
    """Cold and warm, alone and in padded rows."""
    model, ids = known(name), prompt(61)
    rows = torch.cat([prompt(61), prompt(61, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :21] = mask[1, :21] = 0
    plain, logits, _ = generate(model, ids, 30)
    plain_rows, row_logits, _ = generate(model, rows, 30, attention_mask=mask)
    attention.install(model, "torch")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        assert left() == {"torch": 1}
        with kv.decode_graph():
            for number in range(2):
                tokens, found, cache = generate(model, ids, 30)
                assert torch.equal(tokens, plain) and near(found, logits)
                assert kv.last.reused_tokens == 48 * number
                assert all(isinstance(layer, StaticLayer) for layer in cache.layers)
                assert cache.get_seq_length() == 61 + 29
            assert steps == {"recorded": 2, "replayed": 2 * 29}
            for _ in range(2):
                tokens, found, _ = generate(model, rows, 30, attention_mask=mask)
                assert torch.equal(tokens, plain_rows) and near(found, row_logits)
            assert steps == {"recorded": 4, "replayed": 4 * 29}
        assert "forward" not in model.__dict__
        generate(model, ids, 30)
        assert steps == {"recorded": 4, "replayed": 4 * 29}


def test_nothing_the_host_knows_is_in_a_step(client, steps, monkeypatch):
    """What a replay would not do again: the step reads tensors that are there before it, and no length."""
    model, ids = known("llama"), prompt(61)
    attention.install(model, "torch")
    seen = []
    original = decode_step.Step._run

    def run(self):
        before = [layer._storage.data_ptr() for layer in self._cache.layers]
        out = original(self)
        seen.append((self._ids.data_ptr(), self._places.data_ptr(), *before))
        return out

    monkeypatch.setattr(decode_step.Step, "_run", run)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv, kv.decode_graph():
        generate(model, ids, 30)
    assert len(seen) == 30 and len(set(seen)) == 1


def test_a_step_may_run_any_number_of_times(client, monkeypatch):
    """As the warm-ups before a capture do."""
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids, 20)
    attention.install(model, "torch")
    original = decode_step.Step._run
    monkeypatch.setattr(decode_step.Step, "_run", lambda self: [original(self) for _ in range(3)][-1])
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv, kv.decode_graph():
        assert torch.equal(generate(model, ids, 20)[0], plain)


def test_the_cache_goes_on_alone(client, steps):
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids, 24)
    attention.install(model, "torch")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        with kv.decode_graph():
            tokens, _, cache = generate(model, ids, 12)
        assert torch.equal(generate(model, tokens, 12, past_key_values=cache)[0], plain)
        assert kv.last.bypassed == "user_cache"


def test_generated_text_is_published(client, steps):
    model, ids = known("llama"), prompt(20)
    attention.install(model, "torch")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv, kv.decode_graph():
        generate(model, ids, 60)
        assert kv.last.published_blocks == 79 // BLOCK


def test_what_is_no_step_goes_to_the_model(client, steps, left):
    """Beams move rows, and are counted; hidden states are not among what a step gives."""
    model, ids = known("llama"), prompt(61)
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    plain, hidden = model.generate(ids, **beams), generate(model, ids, 6, output_hidden_states=True)[0]
    attention.install(model, "torch")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv, kv.decode_graph():
        assert torch.equal(model.generate(ids, **beams), plain)
        assert torch.equal(generate(model, ids, 6, output_hidden_states=True)[0], hidden)
    assert steps["recorded"] == 0
    assert left() == {"torch": 1, "graph_beams": 1}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_in_place_the_tail_does_not_move(name, paged, client, steps):
    """The kernels know the length as an argument: the model's own forward, over memory taken once."""
    if all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")):
        pytest.skip("no CPU kernels here")
    model, ids = known(name), prompt(61)
    plain, logits, _ = generate(model, ids, 40)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, paged=paged) as kv, kv.decode_graph():
        for _ in range(2):
            tokens, found, cache = generate(model, ids, 40)
            assert torch.equal(tokens, plain) and near(found, logits)
        if not paged:
            assert cache.layers[0].storage.shape[3] == 61 + 40 - 48
    assert steps["recorded"] == 0


@pytest.mark.slow  # torch.compile alone takes 15 s of processor
@pytest.mark.parametrize("in_place", [None, False])
def test_a_forward_that_was_compiled_is_there_again(in_place, client, steps):
    """Also where nothing is recorded. It computes what is no step."""
    if in_place is None and all(attention.available_backends()[name] for name in ("cpu_avx512", "cpu_avx2")):
        pytest.skip("no CPU kernels here")
    model, ids = known("llama", layers=1), prompt(61)
    plain, *_ = generate(model, ids, 5)
    model.forward = compiled = torch.compile(model.forward, backend="eager")
    attention.install(model, "torch" if in_place is False else None)
    with kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=in_place) as kv:
        with kv.decode_graph(), kv.decode_graph():
            assert torch.equal(generate(model, ids, 5)[0], plain)
            twin = copy.deepcopy(model) if steps["recorded"] else None
        assert model.__dict__["forward"] is compiled
    if twin is not None:  # made within: its own weights
        with torch.no_grad():
            model.lm_head.weight.zero_()
            assert float(twin(ids).logits.abs().max()) > 0


def test_torch_in_the_place_of_the_kernels_is_counted(client, steps, left):
    """A dense cache of fixed size has lengths on the device, which torch reads as a mask."""
    if attention.available_backends()["cpu_avx2"]:
        pytest.skip("no CPU kernels here")
    model, ids = known("llama"), prompt(61)
    plain, *_ = generate(model, ids, 5)
    attention.install(model, "cpu_avx2")
    with (
        kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv,
        kv.decode_graph(),
    ):
        assert torch.equal(generate(model, ids, 5)[0], plain)
    assert steps == {"recorded": 1, "replayed": 4}
    assert set(left()) == {"graph"}


def test_what_cannot_be_recorded_is_said(client):
    model = known("llama")
    with (
        kvclient.hf.attach(model, client, block_tokens=BLOCK, in_place=False) as kv,
        pytest.raises(InvalidArgument, match="install"),
        kv.decode_graph(),
    ):
        pass
    attention.install(model, "torch")
    with kvclient.hf.attach(model, client, block_tokens=BLOCK) as kv:
        model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
        with pytest.raises(InvalidArgument, match="forward of its own"), kv.decode_graph():
            pass
    gc.collect()
