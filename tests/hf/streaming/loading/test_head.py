"""Proves that embedding and head that stay in memory come beside the first pass, each when it is needed: no
pass waits at its beginning for what it needs at its end, what fails to come is an error there, and a matrix
that is both comes for both.

Method: a tiny llama with a head of several pieces; a mover whose reads of the head end when the test says so.
"""

import threading

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import DiskMover, StreamingCausalLM, StreamingConfig, StreamingFailed
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint

PROMPT = torch.arange(1, 25)[None]
PARTLY = StreamingConfig(residency="partial_resident", keep_first_k=0, keep_last_k=2)
WHOLE = StreamingConfig(residency="full_resident")


@torch.inference_mode()
def logits(model):
    return model(PROMPT).logits


class Ends(DiskMover):
    """The head, which lies at the end of the file, is read when it may be."""

    def __init__(self, arranged, head):
        super().__init__(*arranged.paths)
        self.may, self.failing, self._head = threading.Event(), 0, {piece.offset for piece in head.pieces}
        self.read = []

    def fill(self, layer, pieces, slot):
        if {piece.offset for piece in pieces} & self._head:
            assert self.may.wait(60), f"{pieces} was waited for"
            self.read.append(pieces)
            if self.failing:
                self.failing -= 1
                raise StreamingFailed(self.path, layer, pieces[0].offset, "no")
        super().fill(layer, pieces, slot)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A head of several pieces, and an embedding of as many; the packed model's, and in 16 bits."""
    home = tmp_path_factory.mktemp("untied")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    write_checkpoint(home, model, 32)
    return home


def with_head(home, config=PARTLY, **more):
    movers = []

    def made(arranged):
        movers.append(Ends(arranged, arranged.tables["lm_head.weight"]))
        return movers[0]

    return StreamingCausalLM.from_pretrained(home, config, mover=made, dtype=torch.bfloat16, **more), movers[
        0
    ]


def test_a_head_that_stays_is_read_beside_the_first_pass(untied):
    """It was read before the model was there, though nothing needs it before the pass's end."""
    want = logits(StreamingCausalLM.from_pretrained(untied, WHOLE, dtype=torch.bfloat16))
    model, mover = with_head(untied)
    head = model.get_output_embeddings()
    assert head.weight.is_meta and not mover.read
    with pytest.raises(InvalidArgument, match="call the layer"):
        torch.nn.functional.linear(torch.zeros(1, 64, dtype=torch.bfloat16), head.weight)
    model.model.norm.register_forward_hook(lambda *_: mover.may.set())
    for _ in range(2):
        assert torch.equal(logits(model), want)
    assert len(mover.read) > 1 and len(set(mover.read)) == len(mover.read)  # in pieces, each once
    assert not head.weight.is_meta and len(head._forward_pre_hooks) == 1  # what lays rows out
    streams_of(model).close()


def test_a_head_that_cannot_be_read_ends_the_first_pass(untied):
    want = logits(StreamingCausalLM.from_pretrained(untied, WHOLE, dtype=torch.bfloat16))
    model, mover = with_head(untied)
    mover.failing = 4
    mover.may.set()
    with pytest.raises(StreamingFailed, match=r"kvstored-streaming\.bin, layer \d+, offset \d") as failed:
        logits(model)
    assert failed.value.offset and failed.value.path == mover.path
    mover.failing = 0
    assert torch.equal(logits(model), want)
    streams_of(model).close()


@pytest.mark.parametrize("role", ["embedding", "head"])
def test_a_head_that_is_the_embedding_comes_for_both(tmp_path, role):
    config = tiny_llama().config
    config.tie_word_embeddings = True
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    want = logits(StreamingCausalLM.from_pretrained(tmp_path, WHOLE))
    model = StreamingCausalLM.from_pretrained(tmp_path, PARTLY)
    modules = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    assert all(module.weight.is_meta for module in modules.values())
    x = PROMPT if role == "embedding" else torch.ones(1, 1, config.hidden_size)
    modules[role](x)
    assert modules["head"].weight is modules["embedding"].weight and not modules["head"].weight.is_meta
    assert torch.equal(logits(model), want)
    streams_of(model).close()
    model = StreamingCausalLM.from_pretrained(tmp_path, PARTLY)
    other = model.get_output_embeddings()
    other.weight = torch.nn.Parameter(torch.ones(config.vocab_size, config.hidden_size), requires_grad=False)
    with pytest.raises(
        InvalidArgument, match="was changed"
    ):  # before it came; the table would be in its place
        logits(model)
    streams_of(model).close()
