"""Proves that a model which was given a limit of memory refuses a request that would take more, before any of
it runs, that one call's memory is no other's, and that what "auto" keeps leaves room for a request.

Method: a tiny model whose layers are read from the disk, under limits made of the planner's own estimates;
calls that count the passes which they ran; two threads of which one stands still; plans of made-up sizes.
"""

import copy
import threading

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import Engine
from kvclient.hf.speculation import Speculation
from kvclient.hf.streaming import (
    Admission,
    RequestTooLarge,
    StreamingCausalLM,
    StreamingConfig,
)
from kvclient.hf.streaming.planner import asked
from kvclient.hf.streaming.planner.shape import Shape
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import WORKING_BYTES, plan
from tests.hf.awq_checkpoint import tiny_llama

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
FITS = 40  # tokens of a prompt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    home = tmp_path_factory.mktemp("plain")
    tiny_llama().save_pretrained(home)
    return home


@pytest.fixture
def opened(checkpoint):
    """`opened(tokens, **options)`: with memory for a prompt of so many, computed at one time."""
    made = []

    def load(tokens=FITS, new=OPTIONS["max_new_tokens"], **options):
        plain = StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_stream"))
        made.append(plain)
        memory = Admission(plain, 1 << 40, tokens).estimate(tokens, new).bytes
        config = StreamingConfig(residency="full_stream", memory=memory, **options)
        made.append(StreamingCausalLM.from_pretrained(checkpoint, config))
        return made[-1]

    yield load
    for model in made:
        streams_of(model).close()


def passes(model):
    """The tokens that each pass is fed from now on."""
    fed = []
    model.model.register_forward_pre_hook(
        lambda _, __, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return fed


def ids(tokens):
    return torch.arange(1, tokens + 1)[None] % 100


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(opened):
    model = opened()
    fed = passes(model)
    model.generate(ids(FITS), **OPTIONS)
    assert fed == [FITS, 1, 1, 1]
    with pytest.raises(RequestTooLarge, match=f"the longest prompt that fits has {FITS}") as told:
        model.generate(ids(FITS + 1), **OPTIONS)
    assert told.value.longest == FITS and len(fed) == 4
    for more in ({"max_new_tokens": 5}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(RequestTooLarge):
            model.generate(input_ids=ids(FITS), **OPTIONS | more)
    with pytest.raises(RequestTooLarge):
        model.generate(torch.cat([ids(FITS)] * 2), **OPTIONS)
    with pytest.raises(RequestTooLarge):  # so long by the configuration
        length = transformers.GenerationConfig(max_length=FITS + 5, do_sample=False, eos_token_id=None)
        model.generate(ids(FITS), length)
    assert len(fed) == 4
    model.generate(input_ids=ids(FITS), **OPTIONS)


def test_how_the_call_is_made_is_all_the_same(opened):
    """By position or by name, drafted, with what the first tokens left in a cache, and of a copy."""
    model = opened()
    wanted = type(model).generate(model, ids(FITS), **OPTIONS)
    config = transformers.GenerationConfig(**OPTIONS)
    assert torch.equal(model.generate(ids(FITS), config), wanted)
    processors, criteria = transformers.LogitsProcessorList(), transformers.StoppingCriteriaList()
    assert torch.equal(model.generate(ids(FITS), config, processors, criteria), wanted)
    mask = torch.ones_like(ids(FITS))
    assert torch.equal(
        model.generate(ids(FITS), attention_mask=mask, custom_generate=Speculation(), **OPTIONS), wanted
    )
    first = model.generate(ids(FITS - 4), return_dict_in_generate=True, **OPTIONS)
    with pytest.raises(RequestTooLarge):  # its last tokens, behind a cache of all before
        behind = {"past_key_values": first.past_key_values, "attention_mask": torch.ones(1, FITS + 1).long()}
        model.generate(ids(FITS + 1)[:, -1:], **behind, **OPTIONS)
    assert copy.deepcopy(model.generation_config) is not None
    assert asked.asked_of(copy.copy(model)) is None


def test_a_prompt_too_long_for_one_time_is_computed_in_pieces(opened, monkeypatch):
    monkeypatch.setattr(asked, "PIECES", (16, 8))
    model = opened()
    pieces = Admission(model, asked.asked_of(model).memory, 16)
    longest = pieces.longest(OPTIONS["max_new_tokens"])
    assert longest > FITS + 16
    fed = passes(model)
    model.generate(ids(longest), **OPTIONS)
    assert max(fed) == 16 and sum(fed) == longest + 3
    said = model.generate(ids(FITS + 16), **OPTIONS)
    assert torch.equal(said, type(model).generate(model, ids(FITS + 16), prefill_chunk_size=16, **OPTIONS))
    with pytest.raises(RequestTooLarge, match=f"fits has {FITS}"):  # the caller's own word holds
        model.generate(ids(longest), prefill_chunk_size=longest, **OPTIONS)
    with pytest.raises(RequestTooLarge):  # drafts take a prompt at one time
        model.generate(ids(longest), custom_generate=Speculation(), **OPTIONS)


def test_the_first_tokens_go_where_that_was_asked_for(opened):
    model = opened(auto_truncate=True)
    said = model.generate(ids(90), attention_mask=torch.ones(1, 90).long(), **OPTIONS)
    longest = said.shape[1] - 4
    assert FITS <= longest < 90 and torch.equal(said[:, :longest], ids(90)[:, -longest:])
    assert torch.equal(said, type(model).generate(model, ids(90)[:, -longest:], **OPTIONS))
    with pytest.raises(RequestTooLarge, match="fits has 0"):
        model.generate(ids(90), **OPTIONS | {"max_new_tokens": 4000})


def test_calls_of_two_threads_share_the_memory(opened):
    model = opened()
    stands, may = threading.Event(), threading.Event()

    def listens(_ids, _scores, **_):
        stands.set()
        assert may.wait(60)
        return torch.zeros(1, dtype=torch.bool)

    options = OPTIONS | {"stopping_criteria": [listens]}
    thread = threading.Thread(target=lambda: model.generate(ids(FITS // 2), **options))
    thread.start()
    try:
        assert stands.wait(60)
        with pytest.raises(RequestTooLarge):
            model.generate(ids(FITS), **OPTIONS)
    finally:
        may.set()
        thread.join()
    model.generate(ids(FITS), **OPTIONS)


def test_an_engine_and_a_store_ask_too(opened, checkpoint):
    """What is put on the model's generate() is put on this one; and its self-test has room."""
    model = opened(600, new=40)
    with kvclient.hf.attach(model, kvclient.InMemoryClient(16 << 20), block_tokens=16) as kv:
        model.generate(ids(64), **OPTIONS)
        model.generate(ids(64), **OPTIONS)
        assert kv.last.reused_tokens >= 48
        with pytest.raises(RequestTooLarge):
            model.generate(ids(64), **OPTIONS | {"max_new_tokens": 40_000})
    with pytest.raises(RequestTooLarge):
        model.generate(ids(64), **OPTIONS | {"max_new_tokens": 40_000})
    model.generate(ids(64), **OPTIONS)


def test_an_engine_refuses_with_the_longest_that_fits(home, client, tmp_path):
    for file in home.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = StreamingConfig(memory=(256 << 20) + (8 << 20))
    options = {"dtype": "float32", "block_tokens": 16, "self_test": False, "streaming": config}
    with Engine.from_pretrained(tmp_path, client, **options) as engine:
        assert engine.generate("Rivers carry stones", 8).text
        with pytest.raises(RequestTooLarge, match=r"the longest prompt that fits has [1-9]"):
            engine.generate("Rivers carry stones" * 100_000, 8)


def test_auto_leaves_room_for_a_request():
    """Layers took all but 256 MiB, whatever a request of this model's shape takes."""
    layers, memory = [{"attention": 100 << 20, "ffn": 200 << 20}] * 10, 3000 << 20
    shape = Shape(kv_token=1 << 20, hidden=1 << 20, scores=0, logits=1 << 20, fixed=100 << 20)
    first, least = asked.rooms(shape, 384)
    assert first == shape.call(384, 128) > WORKING_BYTES and least == WORKING_BYTES
    before, now = (
        plan(StreamingConfig(memory=memory), layers, 0, **how) for how in ({}, {"rooms": (first, least)})
    )
    assert before.bytes + WORKING_BYTES <= memory < before.bytes + first
    assert now.bytes + first <= memory and now.moved > before.moved
    tight = plan(StreamingConfig(memory=(600 << 20) + least), layers, 0, rooms=(first, least))
    assert tight.bytes == 600 << 20  # where no plan leaves so much, one token has room
    with pytest.raises(InvalidArgument, match=f"{least} to work with"):
        plan(StreamingConfig(memory=(600 << 20) + least - 1), layers, 0, rooms=(first, least))


def test_a_plan_of_a_real_model_takes_the_request_it_was_made_for(checkpoint, monkeypatch):
    """room_tokens of a prompt and its answer fit, where no more than that is free."""
    monkeypatch.setattr(asked, "WORKING_BYTES", 0)
    monkeypatch.setattr("kvclient.hf.streaming.model.WORKING_BYTES", 0)
    whole = StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_resident"))
    shape = Shape.of(whole, True, False)
    held = streams_of(whole).plan.bytes
    for tokens in (40, 400, 4000):
        config = StreamingConfig(memory=held + shape.call(tokens, 128), room_tokens=tokens)
        model = StreamingCausalLM.from_pretrained(checkpoint, config)
        assert not any(streams_of(model).plan.streamed)
        admission = Admission(model, config.memory, 128)
        assert admission.fits(tokens - 10, 10)
        assert not admission.fits(2 * tokens, 10)
        less = StreamingConfig(memory=config.memory - 1, room_tokens=tokens)
        model = StreamingCausalLM.from_pretrained(checkpoint, less)
        assert any(streams_of(model).plan.streamed) or streams_of(model).plan.vocabulary
        assert Admission(model, less.memory, 128).fits(tokens - 10, 10)
        streams_of(model).close()
