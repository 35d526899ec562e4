"""Proves that what somebody does to a streamed model counts as it does for one in memory, or is an error: a
weight that was changed would be overwritten by the next read, silently.

Method: a tiny checkpoint, packed and plain, most of whose layers are read, beside itself in memory; each
change is made to both.
"""

import copy
import io

import pytest
import torch

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.registry import streams_of
from tests.hf.zoo import prompt

IDS = prompt(7) % 128


@pytest.fixture
def streamed(checkpoint):
    """The first and the last layer stay."""
    config = StreamingConfig(residency="partial_resident", keep_first_k=1, keep_last_k=1)
    model = StreamingCausalLM.from_pretrained(checkpoint, config)
    yield model
    streams_of(model).close()


@pytest.fixture
def resident(checkpoint):
    return StreamingCausalLM.from_pretrained(checkpoint, StreamingConfig(residency="full_resident"))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def _norm(model, layer=2):
    return model.model.layers[layer].input_layernorm


def _parameter(model):
    _norm(model).weight = torch.nn.Parameter(torch.full((64,), 2.0))


def _of_one_that_stays(model):
    _norm(model, 4).weight = torch.nn.Parameter(torch.full((64,), 2.0))


def _multiplied(model):
    _norm(model).weight.mul_(2)


def _by_operator(model):
    weight = _norm(model).weight
    weight *= 2


def _element(model):
    _norm(model).weight[3] = 2.0


def _data(model):
    _norm(model).weight.data.zero_()


def _another_type(model):
    model.model.layers[2].to(torch.float64)
    _norm(model).double()


def _exchanged(model):
    first, second = _norm(model), model.model.layers[2].post_attention_layernorm
    first.weight, second.weight = second.weight, first.weight


CHANGES = [
    _parameter, _of_one_that_stays, _multiplied, _by_operator, _element, _data, _another_type, _exchanged,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_streamed_weight_that_is_changed_is_an_error(streamed, change):
    with torch.no_grad(), pytest.raises(InvalidArgument, match="streamed weight"):
        change(streamed)
        logits(streamed)


def test_a_change_goes_on_being_one(streamed, resident):
    """It is not overwritten by who was told of it; taken back, all is as it was."""
    norm = _norm(streamed)
    was, norm.weight = norm.weight, torch.nn.Parameter(torch.ones(64))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"input_layernorm.weight was changed, torch.float32\[64\]"):
            logits(streamed)
    norm.weight = was
    assert torch.equal(logits(streamed), logits(resident))


class Adapted(torch.nn.Module):
    """What an adapter puts round a linear layer."""

    def __init__(self, inner, outputs):
        super().__init__()
        self.inner, self.added = inner, torch.nn.Linear(64, outputs, bias=False)
        torch.nn.init.normal_(self.added.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, x):
        return self.inner(x) + self.added(x)


def _adapter(model):
    attention = model.model.layers[2].self_attn
    attention.q_proj = Adapted(attention.q_proj, 64)


def _other_layer(model):
    mlp = model.model.layers[2].mlp
    mlp.down_proj = torch.nn.Linear(96, 64, bias=False)
    torch.nn.init.normal_(mlp.down_proj.weight, generator=torch.Generator().manual_seed(1))


def _other_order(model):
    first, second, *others = model.model.layers
    model.model.layers = torch.nn.ModuleList([second, first, *others])


def _fewer(model):
    del model.model.layers[2]
    model.config.num_hidden_layers = len(model.model.layers)


@pytest.mark.parametrize("change", [_adapter, _other_layer, _other_order, _fewer])
def test_modules_that_are_put_round_or_elsewhere_count(streamed, resident, change):
    """In the answer, and in the identity: which is that of the model in memory."""
    before, identities = logits(resident), []
    with kvclient.InMemoryClient(8 << 20) as client:
        for model in (streamed, resident):
            with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
                identities.append(kv.identity)
            change(model)
            for number, layer in enumerate(model.model.layers):
                layer.self_attn.layer_idx = number
            with kvclient.hf.attach(model, client, block_tokens=16, self_test=False) as kv:
                identities.append(kv.identity)
    found = logits(streamed)
    assert torch.equal(found, logits(resident)) and not torch.equal(found, before)
    assert identities[:2] == identities[2:] and identities[0] != identities[1]


def test_a_module_that_is_put_back_has_its_identity_again(streamed):
    """Where what is read was digested first while it was away."""
    mlp, identities = streamed.model.layers[2].mlp, []
    was = mlp.down_proj
    with kvclient.InMemoryClient(8 << 20) as client:
        for _ in range(2):
            _other_layer(streamed)
            for now in (mlp.down_proj, was):
                mlp.down_proj = now
                with kvclient.hf.attach(streamed, client, block_tokens=16, self_test=False) as kv:
                    identities.append(kv.identity)
    assert identities[:2] == identities[2:] and identities[0] != identities[1]


def test_weights_without_numbers_are_not_compared(streamed):
    weight = _norm(streamed).weight
    with pytest.raises(InvalidArgument, match="none to compare"):
        bool((weight == weight).all())
    assert weight.device == weight.data.device == weight.detach().device == torch.device("cpu")


def test_to_where_it_is_a_model_may_be_moved(streamed, resident):
    streamed.to("cpu").cpu().to(streamed.dtype).to(device="cpu", dtype=streamed.dtype).requires_grad_(False)
    assert torch.equal(logits(streamed), logits(resident))


def test_a_file_without_weights_is_not_written(streamed):
    with pytest.raises(InvalidArgument, match="copy that"):
        torch.save(streamed.state_dict(), io.BytesIO())


def test_a_copy_has_no_weights(streamed, resident):
    with pytest.raises(InvalidArgument):
        logits(copy.deepcopy(streamed))
    assert torch.equal(logits(streamed), logits(resident))
