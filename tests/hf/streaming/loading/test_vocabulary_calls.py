"""Proves that an embedding and a head that are streamed are called as the stock modules are, by place or by
name, and that a call that Ctrl-C ends leaves them nothing, nor is a weight of somebody else's passed over;
and that files of two file systems are read one way.

Method: a tiny llama whose vocabulary does not fit its memory, beside the model in memory.
"""

import functools
import os

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import DiskMover, StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.mover import PAGE, Piece
from kvclient.hf.streaming.registry import streams_of

IDS = torch.arange(1, 25)[None]


@pytest.fixture
def model(tmp_path, monkeypatch):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=20_000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr("kvclient.hf.streaming.frame.ROWS_BYTES", 0)
    config = StreamingConfig(residency="full_stream", memory=3_000_000)
    model = StreamingCausalLM.from_pretrained(tmp_path, config)
    assert streams_of(model).plan.vocabulary == ("embedding", "head")
    yield model
    streams_of(model).close()


@torch.inference_mode()
def test_they_are_called_by_place_or_by_name(model):
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = embedding(IDS)
    assert torch.equal(embedding(input=IDS), rows) and rows.abs().max() > 0
    assert torch.equal(head(input=rows), head(rows))
    for module, x in ((embedding, IDS), (head, rows)):
        for wrong in (lambda module=module, x=x: module(x, x), lambda module=module: module()):
            with pytest.raises(TypeError):
                wrong()
        assert module.weight.is_meta
        with pytest.raises(InvalidArgument, match="call the layer"):  # torch answers what lies in memory
            torch.nn.functional.linear(rows, module.weight)


@torch.inference_mode()
def test_a_call_that_ctrl_c_ends_leaves_them_nothing(model):
    want = model(IDS).logits

    def ends(*_):
        raise KeyboardInterrupt

    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        handle = module.register_forward_pre_hook(ends)
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        handle.remove()
        assert torch.equal(model(IDS).logits, want)
        assert module.weight.is_meta


def test_a_model_is_where_its_tokens_are_wanted(model):
    """It said "meta": so did what a stranger's program had moved there, and drafts of transformers' own."""
    assert model.device == IDS.device == model.model.layers[1].mlp.up_proj.weight.device
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generate = functools.partial(type(model).generate, model)  # nobody asks whether it fits
    want = generate(IDS.to(model.device), **asked)
    assert torch.equal(generate(IDS, prompt_lookup_num_tokens=3, **asked), want)


def test_a_weight_that_is_put_in_its_place_is_an_error(model):
    """The next call would compute without it. Each other's they may have, as tie_weights() gives them."""
    want, modules = model(IDS).logits, (model.get_input_embeddings(), model.get_output_embeddings())
    for module in modules:
        was, module.weight = module.weight, torch.nn.Parameter(torch.ones(20_000, 64), requires_grad=False)
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="was changed"):
                model(IDS)
        module.weight = was
    modules[1].weight = modules[0].weight
    assert torch.equal(model(IDS).logits, want)


def test_files_of_two_file_systems_are_read_one_way(tmp_path, monkeypatch):
    """The first would have been read past the page cache, by a reader that was told of the second."""
    paths, usual = [tmp_path / name for name in ("first", "second")], os.open
    for path in paths:
        path.write_bytes(os.urandom(2 * PAGE + 100))
    opened = []

    def refused(path, flags, *more):
        if flags & os.O_DIRECT and str(path) == str(paths[1]):
            raise OSError(22, "Invalid argument")
        opened.append((str(path), usual(path, flags, *more)))
        return opened[-1][1]

    monkeypatch.setattr(os, "open", refused)
    mover = DiskMover(*paths)
    monkeypatch.undo()
    flags = {name: os.O_DIRECT & _flags(fd) for name, fd in opened}
    assert not mover.direct and set(flags) == set(map(str, paths)) and not any(flags.values())
    slot = memoryview(bytearray(3 * PAGE))
    for number, path in enumerate(paths):
        mover.fill(0, [Piece(0, 3 * PAGE, None, number, 2 * PAGE + 100)], slot)
        assert bytes(slot[: 2 * PAGE + 100]) == path.read_bytes()
    mover.close()


def _flags(fd):
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)
