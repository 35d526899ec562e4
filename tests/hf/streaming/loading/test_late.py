"""Proves that the first pass takes layers and a head that stay out of slots, and that they are read once
more, and once, behind that pass: so memory that nobody has touched keeps no first token waiting.

Method: a small llama, plain in 16 bits and packed, whose last layers and head stay; a mover that keeps a list
of who reads what.
"""

import copy
import threading

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import DiskMover, StreamingCausalLM, StreamingConfig, StreamingFailed
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import write_checkpoint

PROMPT = torch.arange(1, 25)[None]
LAYERS, STAYS = 8, 5  # those from it on stay, and with the head are no more than those before
STREAMED, LATE = set(range(STAYS)), (5, 6, 7)
PARTLY = StreamingConfig(residency="partial_resident", keep_first_k=0, keep_last_k=LAYERS - STAYS)


@pytest.fixture(scope="module", params=["plain", "awq"])
def home(request, tmp_path_factory):
    """A head of several pieces, each no larger than a layer."""
    home = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=900 if request.param == "awq" else 3000, hidden_size=128, intermediate_size=512,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15,
        max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    if request.param == "plain":
        model.save_pretrained(home)
    else:
        write_checkpoint(home, model, 32)
    return home


class Seen(DiskMover):
    """read: who has read what, in that order: whether it was read ahead, and the layer."""

    def __init__(self, arranged):
        super().__init__(*arranged.paths)
        self.read, self.failing = [], 0
        self.head = {piece.offset for piece in arranged.tables["lm_head.weight"].pieces}

    def fill(self, layer, pieces, slot):
        ahead = threading.current_thread().name.startswith("kvclient-loading")
        what = "head" if {piece.offset for piece in pieces} & self.head else layer
        if not ahead and what == LATE[0] and self.failing:
            self.failing -= 1
            raise StreamingFailed(self.path, layer, pieces[0].offset, "no")
        super().fill(layer, pieces, slot)
        self.read.append((ahead, what))

    def through_slots(self):
        return {what for ahead, what in self.read if not ahead}


@pytest.fixture
def opened(home):
    made = []

    def opened(config=PARTLY):
        movers = []
        model = StreamingCausalLM.from_pretrained(
            home, config, mover=lambda files: movers.append(Seen(files)) or movers[0], dtype=torch.bfloat16
        )
        made.append(model)
        return model, movers[0]

    yield opened
    for model in made:
        streams_of(model).close()


@torch.inference_mode()
def logits(model):
    return model(PROMPT).logits


@pytest.fixture(scope="module")
def want(home):
    whole = StreamingConfig(residency="full_resident")
    return logits(StreamingCausalLM.from_pretrained(home, whole, dtype=torch.bfloat16))


def is_there(model):
    return not any(tensor.is_meta for layer in model.model.layers[STAYS:] for tensor in layer.parameters())


def test_what_stays_comes_through_slots_once(opened, want):
    model, mover = opened()
    assert torch.equal(logits(model), want)
    streams_of(model).settle()
    assert is_there(model) and not model.lm_head.weight.is_meta
    late = [*LATE, "head"]
    assert mover.through_slots() >= STREAMED | set(late)
    last = max(i for i, read in enumerate(mover.read) if read == (False, "head"))
    assert [what for ahead, what in mover.read[:last] if ahead and what in late] == []  # none beside the pass
    again = [what for ahead, what in mover.read[last:] if ahead]
    assert sorted(map(str, set(again))) == sorted(map(str, late))
    assert again.count("head") == len(mover.head) > 1
    assert [again.count(layer) for layer in LATE] == [2, 2, 2]  # parts
    del mover.read[:]
    for _ in range(2):
        assert torch.equal(logits(model), want)
    assert {what for _, what in mover.read} <= STREAMED
    assert streams_of(model).left() == 0 and not streams_of(model).staying._handles
    assert "forward" not in model.lm_head.__dict__


def test_no_more_is_read_twice_than_a_pass_reads(opened, want):
    """Layer 1 alone is streamed: of what is late there is room for one, and the head is larger."""
    all_but_one = StreamingConfig(residency="partial_resident", keep_first_k=1, keep_last_k=LAYERS - 2)
    model, mover = opened(all_but_one)
    assert torch.equal(logits(model), want)
    assert mover.through_slots() == {1, LATE[2]}
    streams_of(model).settle()
    assert torch.equal(logits(model), want) and is_there(model)


def test_who_looks_at_all_weights_before_the_first_pass_has_them_in_place(opened, want):
    model, mover = opened()
    streams_of(model).settle()
    assert is_there(model)
    assert torch.equal(logits(model), want)
    assert mover.through_slots() <= STREAMED


def test_who_looks_at_them_in_the_middle_of_it_has_them_and_it_goes_on(opened, want):
    model, _ = opened()
    settled = []

    def look(*_):
        if not settled:
            thread = threading.Thread(target=lambda: (streams_of(model).settle(), settled.append(1)))
            thread.start()
            thread.join(60)

    model.model.layers[LATE[0]].mlp.register_forward_pre_hook(look)
    assert torch.equal(logits(model), want) and settled
    assert is_there(model)
    assert torch.equal(logits(model), want)
    assert not streams_of(model).staying._handles
    slots = streams_of(model).scheduler.slots
    assert not any(slot.users for slot in slots)


def test_a_part_of_a_late_layer_waits_for_it(opened, want):
    model, _ = opened()
    assert torch.equal(logits(model), want)
    x = torch.randn(1, 3, 128, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert not model.model.layers[LATE[1]].mlp(x).is_meta
    assert not any(tensor.is_meta for tensor in model.model.layers[LATE[1]].parameters())
    assert torch.equal(logits(model), want)


def test_two_first_passes_at_one_time(opened, want):
    model, _ = opened()
    found = []
    threads = [threading.Thread(target=lambda: found.append(logits(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and all(torch.equal(each, want) for each in found)
    assert torch.equal(logits(model), want)
    assert not any(slot.users for slot in streams_of(model).scheduler.slots)


def test_a_layer_of_which_another_thread_has_put_a_part_is_waited_for(opened, want, monkeypatch):
    """It has no slot any more: the first pass went on without what had not come."""
    model, _ = opened()
    streams = streams_of(model)
    with torch.inference_mode():
        streams.staying.begin()
    part, keep, holding = streams.staying._came.part, streams.staying.keep, streams.scheduler.holding
    put, gone_on, threads = threading.Event(), threading.Event(), []

    def slow(number, name):
        if number == LATE[0] and LATE[0] not in streams.staying.late:  # its first part is there
            put.set()
            assert gone_on.wait(60)  # to its parts, or to wait for them
        return part(number, name)

    def waiting(number):
        gone_on.set()
        keep(number)

    def once_a_part_is_there(number, *args):
        if number == LATE[0] and not threads:
            threads.append(threading.Thread(target=keep, args=(number,)))
            threads[0].start()
            assert put.wait(60)
            monkeypatch.setattr(streams.staying, "keep", waiting)
        return holding(number, *args)

    monkeypatch.setattr(streams.staying._came, "part", slow)
    monkeypatch.setattr(streams.scheduler, "holding", once_a_part_is_there)
    model.model.layers[LATE[0]].mlp.register_forward_pre_hook(lambda *_: gone_on.set())
    assert torch.equal(logits(model), want)
    threads[0].join(60)
    streams.settle()
    assert is_there(model) and torch.equal(logits(model), want)


def test_a_read_that_fails_and_a_layer_that_raises_are_followed_by_a_call_that_works(opened, want):
    model, mover = opened()
    mover.failing = 4  # read before it is asked for, and again then
    with pytest.raises(StreamingFailed, match="layer 5, offset"):
        logits(model)
    assert torch.equal(logits(model), want)
    model, _ = opened()
    raising = [KeyError("inside")]

    def fail(*_):
        if raising:
            raise raising.pop()

    model.model.layers[LATE[0]].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="inside"):
        logits(model)
    assert not any(slot.users for slot in streams_of(model).scheduler.slots)
    for _ in range(2):
        assert torch.equal(logits(model), want)


def test_what_was_changed_is_refused_and_a_copy_has_no_weights(opened):
    model, _ = opened()
    norm = model.model.layers[LATE[0]].input_layernorm
    norm.weight = torch.nn.Parameter(torch.ones(128, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(InvalidArgument, match="was changed"):
        logits(model)
    model, _ = opened()
    copied = []
    model.model.norm.register_forward_hook(lambda *_: copied.append(copy.deepcopy(model.lm_head)))
    logits(model)
    with pytest.raises(InvalidArgument, match="call the layer"):
        copied[0](torch.zeros(1, 128, dtype=torch.bfloat16))


def test_under_autograd_nothing_is_late(opened, want):
    """A backward would find another layer in the slot."""
    model, mover = opened()
    assert torch.equal(model(PROMPT).logits.detach(), want)
    assert mover.through_slots() <= STREAMED


def test_where_the_head_is_the_embedding_the_last_layer_ends_the_first_pass(tmp_path):
    """Nobody has to call again for what is late to come, and none of it is in a slot by then."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    read, again = [], threading.Semaphore(0)

    class Lists(DiskMover):
        def fill(self, layer, pieces, slot):
            super().fill(layer, pieces, slot)
            ahead = threading.current_thread().name.startswith("kvclient-loading")
            read.append((ahead, layer))
            if ahead and layer in LATE:
                again.release()

    model = StreamingCausalLM.from_pretrained(
        tmp_path, PARTLY, mover=lambda files: Lists(*files.paths), dtype=torch.bfloat16
    )
    first = logits(model)
    for _ in range(2 * len(LATE)):  # parts
        assert again.acquire(timeout=60)
    assert {layer for ahead, layer in read if not ahead} == STREAMED | set(LATE)
    del read[:]
    for _ in range(2):
        assert torch.equal(logits(model), first)
    assert {layer for _, layer in read} <= STREAMED
    streams_of(model).close()


def test_a_call_under_autograd_behind_one_that_failed_has_them_in_their_place(opened, home):
    model, mover = opened()

    def gradient(model):
        """Through the late layers and the head."""
        x = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        x.requires_grad_()
        turns = model.model.rotary_emb(x.detach(), torch.arange(5)[None])
        y = x
        for number in LATE[1:]:
            y = model.model.layers[number](y, position_embeddings=turns)
        model.lm_head(model.model.norm(y)).float().square().sum().backward()
        return x.grad

    def fail(*_):
        raise KeyError("inside")

    failing = model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(KeyError, match="inside"):
        logits(model)
    failing.remove()
    assert set(streams_of(model).staying.late) > set(LATE)
    found = gradient(model)
    whole = StreamingConfig(residency="full_resident")
    assert torch.equal(found, gradient(StreamingCausalLM.from_pretrained(home, whole, dtype=torch.bfloat16)))
    assert mover.through_slots() <= STREAMED | {LATE[0]}  # that one may have been read before


def test_without_a_thread_to_be_had_the_call_fails_and_the_next_one_works(opened, want, monkeypatch):
    model, _ = opened()

    def start(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            for _ in range(2):  # threads of before may still read
                logits(model)
    found = []
    thread = threading.Thread(target=lambda: found.append(logits(model)), daemon=True)
    thread.start()
    thread.join(60)
    assert found and torch.equal(found[0], want)
    streams_of(model).close()
    assert is_there(model)


@pytest.mark.parametrize("residency", ["partial_resident", "full_stream", "full_resident"])
def test_no_gradient_is_computed_by_what_lies_in_a_slot_later(home, residency):
    """It was, without a word. The numbers themselves are those of a model that has all of its weights."""
    kept = {"keep_first_k": 0, "keep_last_k": LAYERS - STAYS} if residency == "partial_resident" else {}
    configs = StreamingConfig(residency="full_resident"), StreamingConfig(residency=residency, **kept)
    whole, model = (
        StreamingCausalLM.from_pretrained(home, config, dtype=torch.bfloat16) for config in configs
    )
    x = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    found = model(inputs_embeds=x).logits
    assert torch.equal(found, whole(inputs_embeds=x).logits)
    if residency == "full_resident":
        found.float().square().sum().backward()
        assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
    else:
        what = "layer 4" if residency == "partial_resident" else "layer 7|a head"
        with pytest.raises(InvalidArgument, match=f"backward through ({what}).*full_resident"):
            found.float().square().sum().backward()
    if streams := streams_of(model):
        streams.close()
