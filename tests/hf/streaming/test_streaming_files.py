"""Proves what streaming makes of files: headers that lie, a process that is killed while it rearranges, a
vocabulary that stays on the disk.

Method: real safetensors files with their headers changed byte by byte and field by field; a child that is
stopped by SIGKILL behind a known stretch; a tiny llama whose embedding and head are larger than its memory,
bit for bit against the model in memory.
"""

import copy
import functools
import json
import os
import pickle
import random
import signal
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvclient.errors import InvalidArgument
from kvclient.hf import awq
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.awq.packing import from_panels, in_panels, mark_panels, quantise
from kvclient.hf.model.identity import digest_weights
from kvclient.hf.speculation import Speculation
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, StreamingFailed
from kvclient.hf.streaming.files.headers import header
from kvclient.hf.streaming.files.index import BLOCK_BYTES, VERSION
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.residency import Vocabulary, plan
from kvclient.hf.streaming.weights import vocabulary
from tests.hf.awq_checkpoint import write_checkpoint
from tests.warm_python import run as run_warm

PROMPT = torch.arange(1, 25)[None]


def tiny(vocab=128, tie=False, layers=4):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15,
        tie_word_embeddings=tie,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def logits(model, ids=PROMPT):
    with torch.inference_mode():
        return model(ids).logits


# ---------------------------------------------------------------- headers


def written(path, said, data=b"\0" * 64, length=None):
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(**changed):
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changed}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (tensor(data_offsets=[0, 80]), r"a lies at \[0, 80\] of 64 bytes"),
        (tensor(data_offsets=[16, 0]), "a lies at"),
        (tensor(data_offsets=[-16, 0]), "a lies at"),
        (tensor(data_offsets=[0, 16.0]), "a lies at"),
        (tensor(data_offsets=[0]), "a lies at"),
        (tensor(shape=[2, 3]), r"a is F32\[2, 3\] in 16 bytes"),
        (tensor(shape=[1 << 62, 1 << 62]), "a has shape"),
        (tensor(shape=[True, 4]), "a has shape"),
        (tensor(shape="2x2"), "a has shape"),
        (tensor(shape=[1] * 1000), "a has shape"),
        (tensor(dtype="Q4"), "a has dtype Q4; known are"),
        (tensor(dtype=["F32"]), "a has dtype"),
        ({"a": 3}, "a has dtype None"),
        ([], "header that is no object"),
        (b"{", "no header that can be read"),
        (b"[" * 100_000, "no header that can be read"),
        ({**tensor(), "b": tensor(data_offsets=[8, 24])["a"]}, "b lies inside of another tensor"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(tmp_path, said, words):
    with pytest.raises(InvalidArgument, match=words):
        header(written(tmp_path / "model.safetensors", said))


def test_lengths_that_lie_are_refused(tmp_path):
    for length in (0, 1 << 20, (1 << 64) - 1):
        with pytest.raises(InvalidArgument, match="header"):
            header(written(tmp_path / "model.safetensors", tensor(), length=length))
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(InvalidArgument, match="3 in all"):
        header(tmp_path / "short")


def test_changed_headers_are_refused_or_lie_inside_of_the_file(tmp_path):
    """5,000 files with bytes of their header changed: nothing but InvalidArgument, nothing outside."""
    path, dice = tmp_path / "model.safetensors", random.Random(7)
    save_file({"layers.0.w": torch.zeros(3, 5), "layers.0.b": torch.zeros(5, dtype=torch.int32)}, path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(5000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(8 + length)] = dice.choice(b'0123456789{}[]",:-eFI\0\xff')
        path.write_bytes(data)
        try:
            found = header(path)
        except InvalidArgument:
            refused += 1
        else:
            assert all(0 <= at.offset <= at.offset + at.length <= len(whole) for at in found.values())
    assert refused > 1000


@pytest.mark.parametrize("packed", [False, True])
def test_missing_tensors_and_groups_that_do_not_divide_are_named(tmp_path, packed):
    home = tmp_path / "home"
    home.mkdir()
    if packed:
        write_checkpoint(home, tiny(), 32)
    else:
        tiny().save_pretrained(home)
    whole = load_file(home / "model.safetensors")
    gone = ["model.layers.2.self_attn.q_proj." + ("qweight" if packed else "weight"), "model.norm.weight"]
    gone += ["model.layers.1.mlp.up_proj.scales"] if packed else ["lm_head.weight"]
    for name in gone:
        save_file({key: value for key, value in whole.items() if key != name}, home / "model.safetensors")
        wanted = name.rpartition(".")[0].removeprefix("model.layers.")
        with pytest.raises(InvalidArgument, match=wanted.partition(".")[2] if "layers" in name else wanted):
            StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))
    if packed:
        save_file(whole, home / "model.safetensors")
        said = json.loads((home / "config.json").read_text())
        for group in (33, 64):  # divides nothing; divides, but is not how the scales are
            said["quantization_config"]["group_size"] = group
            (home / "config.json").write_text(json.dumps(said))
            with pytest.raises(InvalidArgument, match="fits no groups of"):
                StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))


# ---------------------------------------------------------------- killed while rearranging

KILLED = """
import os, sys
from kvclient.hf.streaming import StreamingCausalLM

def told(done, whole):
    told.count += 1
    if told.count == int(sys.argv[2]):
        os.kill(os.getpid(), 9)

told.count = 0
StreamingCausalLM.from_pretrained(sys.argv[1], progress=told)
"""


def test_who_is_killed_while_rearranging_is_gone_on_from(tmp_path):
    tiny().save_pretrained(tmp_path)
    want = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    command = [sys.executable, "-c", KILLED, str(tmp_path), "5"]
    done = run_warm(command, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "kvstored-streaming.bin").exists()
    part = tmp_path / "kvstored-streaming.bin.part"
    kept = part.stat().st_size
    lines = (tmp_path / "kvstored-streaming.journal").read_text().splitlines()
    assert len(lines) == 1 + 5 and kept > 0
    before, again = os.stat(part).st_ino, []
    with open(part, "r+b") as file:  # the fourth is damaged: it and what is behind it are written again
        file.seek(json.loads(lines[4])[1][0])
        file.write(b"\xff\xff\xff")
    with open(tmp_path / "kvstored-streaming.journal", "a") as file:
        file.write('["layer", 2, "ff')  # killed in the middle of a line
    from kvclient.hf.streaming.files import rearrange

    class Counted(rearrange._Unfinished):
        def write(self, stretch):
            again.append(stretch.key)
            return super().write(stretch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rearrange, "_Unfinished", Counted)
        model = StreamingCausalLM.from_pretrained(tmp_path, StreamingConfig(residency="full_stream"))
    assert again[0] == ["layer", 1, "ffn"] and len(again) == 4 * 2 - 3 + 2
    assert os.stat(tmp_path / "kvstored-streaming.bin").st_ino == before
    assert torch.equal(logits(model), want)
    assert sorted(path.suffix for path in tmp_path.glob("kvstored-*")) == [".bin", ".json", ".lock"]
    streams_of(model).close()


def test_a_journal_of_another_checkpoint_is_not_believed(tmp_path):
    tiny().save_pretrained(tmp_path)
    run_warm([sys.executable, "-c", KILLED, str(tmp_path), "5"], timeout=300)
    assert (tmp_path / "kvstored-streaming.journal").exists()
    torch.manual_seed(9)
    other = transformers.LlamaForCausalLM(tiny().config).eval()
    other.save_pretrained(tmp_path)
    model = StreamingCausalLM.from_pretrained(tmp_path, StreamingConfig(residency="full_stream"))
    assert torch.equal(logits(model), logits(other))
    streams_of(model).close()


def packed_layer():
    """[320, 200]: three tiles of inputs, the last of 64, and two panels, the last of 9 words."""
    layer = AwqLinear(320, 200, 64, True, torch.float32)
    layer.qweight, layer.qzeros, layer.scales = quantise(torch.randn(200, 320), 64)
    return layer


def test_a_layer_in_panels_has_the_checkpoints_state_and_bits():
    layer = packed_layer()
    words, state = layer.qweight, copy.deepcopy(layer.state_dict())
    x, other = torch.randn(3, 320), packed_layer()
    wanted, others = layer(x), other(x)
    layer.into_panels()
    held = layer.qweight
    assert int(held.view(-1)[128 * 16 + 9]) == int(words[1, 16]), "the second panel's second input"
    assert int(held.view(-1)[128 * 25 + 16 * 2]) == int(words[130, 0]), "the second tile's third input"
    assert torch.equal(layer(x), wanted) and not torch.equal(held, words)
    assert torch.equal(layer.weights(40, 152, torch.float32), awq_twin(state).weights(40, 152, torch.float32))
    for found in (layer.state_dict(), copy.deepcopy(layer).state_dict()):
        assert all(torch.equal(found[name], value) for name, value in state.items())
    sent = pickle.loads(ForkingPickler.dumps(layer))  # as torch.multiprocessing gives it to a process
    assert torch.equal(copy.deepcopy(layer)(x), wanted) and torch.equal(sent(x), wanted)
    sent.qweight = layer.qweight.clone()  # as accelerate moves buffers, by hand
    assert torch.equal(sent(x), wanted) and torch.equal(sent.state_dict()["qweight"], words)
    layer.load_state_dict(other.state_dict())
    assert layer.qweight is held and torch.equal(layer(x), others), "loaded where the words lie"
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(x), wanted)
    layer.into_panels()
    layer.qweight = words  # whoever puts words there has the checkpoint's
    assert torch.equal(layer(x), wanted)
    layer.into_panels()
    assert torch.equal(layer._apply(torch.clone)(x), wanted)
    layer.into_panels()
    assert layer.to("meta").qweight.shape == words.shape and not in_panels(layer.qweight)


def awq_twin(state):
    twin = packed_layer()
    twin.load_state_dict(state)
    return twin


def test_panels_on_the_disk_are_the_checkpoints_words(tmp_path):
    """Bit for bit, by one identity; a file of before there were panels is written anew."""
    write_checkpoint(tmp_path, tiny(), 32)
    config = StreamingConfig(residency="full_stream")
    held = awq.from_pretrained(tmp_path)
    packed = [module for module in held.modules() if isinstance(module, AwqLinear)]
    assert packed and all(in_panels(module.qweight) for module in packed)
    said = tmp_path / "kvstored-streaming.json"
    for change in (None, {"version": 2}):
        if change is not None:
            before = (json.loads(said.read_bytes()) | change).items()
            said.write_text(json.dumps({name: value for name, value in before if name != "crc"}))
        told = []
        streamed = StreamingCausalLM.from_pretrained(
            tmp_path, config, progress=lambda done, _, told=told: told.append(done)
        )
        assert told and json.loads(said.read_bytes())["version"] == VERSION
        assert torch.equal(logits(streamed), logits(held))
        assert digest_weights(streamed) == digest_weights(held)
        streams_of(streamed).close()
    words = load_file(tmp_path / "model.safetensors")
    stored = json.loads(said.read_bytes())["layers"][1]["ffn"]
    for name, _, shape, offset, length, panels in stored["tensors"]:
        if name.endswith(".qweight"):
            with open(tmp_path / "kvstored-streaming.bin", "rb") as file:
                file.seek(stored["piece"][0] + offset)
                laid = torch.frombuffer(bytearray(file.read(length)), dtype=torch.int32).view(shape)
            assert panels and torch.equal(from_panels(mark_panels(laid)), words[f"model.layers.1.{name}"])


# ---------------------------------------------------------------- the vocabulary


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_larger_than_the_memory(tmp_path, tie, dtype, monkeypatch):
    model = tiny(vocab=20_000, tie=tie).to(dtype)
    model.save_pretrained(tmp_path)
    # Not transformers' own: where its weights happen to lie decides the last bits of a row's products.
    stock = StreamingCausalLM.from_pretrained(tmp_path, StreamingConfig(residency="full_resident"))
    ids = PROMPT * 801
    monkeypatch.setattr(vocabulary, "ROWS_BYTES", 256 << 10)
    monkeypatch.setattr("kvclient.hf.streaming.frame.ROWS_BYTES", 256 << 10)
    whole = StreamingCausalLM.from_pretrained(tmp_path, StreamingConfig(residency="full_stream"))
    need = streams_of(whole).plan.bytes
    streams_of(whole).close()
    table = 20_000 * 64 * dtype.itemsize
    rows = min(table, (256 << 10) + BLOCK_BYTES)
    asked = {"head": need - 1} if tie else {"embedding": need - 1, "head": need - table + rows - 1}
    for kind, memory in asked.items():
        config = StreamingConfig(residency="full_stream", memory=memory)
        streamed = StreamingCausalLM.from_pretrained(tmp_path, config)
        chosen = streams_of(streamed).plan
        assert chosen.vocabulary[-1] == kind and chosen.bytes <= memory
        assert (chosen.moved >= table) == (kind == "head")
        for _ in range(2):
            assert torch.equal(logits(streamed, ids), logits(stock, ids))
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        generate = functools.partial(type(streamed).generate, streamed)  # nobody asks whether it fits
        assert torch.equal(generate(ids, **options), stock.generate(ids, **options))
        mask = torch.ones_like(ids)  # the drafts went to where the first weight is: nowhere
        drafted = generate(ids, attention_mask=mask, custom_generate=Speculation(), **options)
        assert dtype != torch.float32 or torch.equal(drafted, stock.generate(ids, **options))
        for row in range(0, 20_000, 1997):  # more rows than may be held at one time
            assert torch.equal(logits(streamed, torch.tensor([[row]])), logits(stock, torch.tensor([[row]])))
        assert streamed.get_input_embeddings().weight.is_meta
        with pytest.raises(IndexError):
            logits(streamed, torch.tensor([[20_000]]))
        assert torch.equal(logits(streamed, ids), logits(stock, ids))
        streams_of(streamed).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streamed_head_with_a_bias_rounds_once(tmp_path, dtype, monkeypatch):
    torch.manual_seed(3)
    config = transformers.PhiConfig(
        vocab_size=20_000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.PhiForCausalLM(config).to(dtype)
    torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("kvclient.hf.streaming.frame.ROWS_BYTES", 0)
    stock = StreamingCausalLM.from_pretrained(tmp_path, StreamingConfig(residency="full_resident"))
    config = StreamingConfig(residency="full_stream", memory=streams_of(stock).plan.bytes // 3)
    streamed = StreamingCausalLM.from_pretrained(tmp_path, config)
    assert "head" in streams_of(streamed).plan.vocabulary
    for ids in (PROMPT, PROMPT[:, :1]):
        assert torch.equal(logits(streamed, ids), logits(stock, ids))
    streams_of(streamed).close()


def test_a_damaged_row_is_never_computed_with(tmp_path, monkeypatch):
    tiny(vocab=20_000).save_pretrained(tmp_path)
    monkeypatch.setattr("kvclient.hf.streaming.frame.ROWS_BYTES", 0)
    config = StreamingConfig(residency="full_stream", memory=6_000_000)
    model = StreamingCausalLM.from_pretrained(tmp_path, config)
    assert "embedding" in streams_of(model).plan.vocabulary
    index = json.loads((tmp_path / "kvstored-streaming.json").read_text())
    begin = index["tables"]["model.embed_tokens.weight"]["pieces"][0][0]
    with open(tmp_path / "kvstored-streaming.bin", "r+b") as file:
        file.seek(begin + 15_000 * 256)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    logits(model)
    for _ in range(2):
        with pytest.raises(StreamingFailed, match=r"offset \d+: the bytes are others"):
            logits(model, torch.tensor([[15_000]]))
    logits(model)
    streams_of(model).close()


def test_the_identity_is_that_of_the_model_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("kvclient.hf.streaming.frame.ROWS_BYTES", 0)
    for tie in (False, True):
        tiny(vocab=20_000, tie=tie).save_pretrained(tmp_path)
        stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        config = StreamingConfig(residency="full_stream", memory=5_000_000)
        streamed = StreamingCausalLM.from_pretrained(tmp_path, config)
        assert "embedding" in streams_of(streamed).plan.vocabulary
        assert digest_weights(streamed) == digest_weights(stock)
        streams_of(streamed).close()


def test_auto_streams_what_costs_the_least_a_token():
    layers = [{"attention": 100, "ffn": 200}] * 10
    config = {"residency": "auto", "n_staging_slots": 2}
    vocabulary = Vocabulary(embedding=1000, head=1000, piece=100, rows=50)
    work = 256 << 20

    def chosen(memory):
        return plan(StreamingConfig(**config, memory=memory + work), layers, 10, vocabulary)

    assert (chosen(5010).moved, chosen(5010).vocabulary) == (0, ())
    found = chosen(5009)  # rows of the embedding cost nothing
    assert (found.moved, found.vocabulary) == (0, ("embedding",))
    assert chosen(4060).moved == 0
    found = chosen(4059)
    assert found.vocabulary == ("embedding",) and found.moved == 900  # of three layers, in two slots
    least = chosen(660)
    assert (least.moved, least.vocabulary) == (4000, ("embedding", "head"))
    with pytest.raises(InvalidArgument, match=r"memory=\d+; with every layer streamed the model needs"):
        chosen(659)
