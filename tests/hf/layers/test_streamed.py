"""Proves that the decoder layers of a packed model are computed as one whether their weights stay or are read
for each pass, with the same bits; that what is proven at load is read once; and that a load that fails ends
its threads.

Method: a tiny AWQ checkpoint with heads of 32 and biases, by each residency, beside the model in memory that
was given the same layers.
"""

import threading

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import awq, layers
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, StreamingFailed, expected_s
from kvclient.hf.streaming.mover import DiskMover
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.layers.test_decoder import EARLY
from tests.hf.zoo import prompt

pytestmark = pytest.mark.skipif(EARLY, reason="this release's layers are left to torch")
COUNT = 4
RESIDENCIES = {
    "full_resident": {},
    "partial_resident": {"keep_first_k": 0, "keep_last_k": 1},
    "ffn_only_stream": {},
    "full_stream": {"n_staging_slots": 3},
}


def write(home, dtype=torch.float32, stored=None):
    """stored: the type of what is not packed, on the disk."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=COUNT, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).to(dtype).eval()
    for part in model.modules():
        if type(part).__name__ == "Qwen2RMSNorm":
            part.weight.data.uniform_(0.5, 1.5)

    def change(tensors):
        tensors |= {
            name: torch.randn(tensor.shape).to(tensor.dtype)
            for name, tensor in model.state_dict().items()
            if name.endswith("bias")
        }
        if stored is not None:
            packed = ("qweight", "qzeros", "scales")
            tensors |= {n: t.to(stored) for n, t in tensors.items() if not n.endswith(packed)}

    return write_checkpoint(home, model, 32, change=change)


def opened(home, residency, mover=None, **more):
    config = StreamingConfig(residency=residency, **RESIDENCIES.get(residency, {}))
    return StreamingCausalLM.from_pretrained(home, config, mover=mover, **more)


def in_memory(home, dtype):
    model = awq.from_pretrained(home, dtype)
    assert layers.install(model.model.layers)
    return model


@torch.inference_mode()
def logits(model, ids):
    return model(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [None, torch.float16])
def test_layers_are_computed_as_one_wherever_their_weights_lie(tmp_path, few, dtype, stored):
    home = write(tmp_path, dtype, stored)
    wanted = in_memory(home, dtype)
    for residency in RESIDENCIES:
        model = opened(home, residency, dtype=dtype)
        for tokens, computed in ((60, 0), (40, COUNT), (1, COUNT), (1, COUNT)):
            few.clear()
            found = logits(model, prompt(tokens))
            assert len(few) == computed, (residency, tokens)
            assert torch.equal(found, logits(wanted, prompt(tokens))), (residency, tokens)
        streams_of(model).close()


class Counted(DiskMover):
    """Tells which layers were read."""

    def __init__(self, arranged):
        super().__init__(*arranged.paths)
        self.read = []

    def fill(self, layer, pieces, slot):
        self.read.append(layer)
        super().fill(layer, pieces, slot)


def test_what_is_looked_at_before_the_first_pass_is_not_read_again(tmp_path):
    made = []
    model = opened(write(tmp_path), "full_stream", lambda arranged: made.append(Counted(arranged)) or made[0])
    assert "forward" in model.model.layers[COUNT - 1].__dict__
    assert streams_of(model).measured((1,))
    scheduler = streams_of(model).scheduler
    assert scheduler.first_s is None and not scheduler.hits and not any(scheduler.waited_s.values())
    logits(model, prompt(5))
    layers = [number for number in made[0].read if number < COUNT]  # behind them the embedding and the head
    assert layers[:COUNT] == list(range(COUNT))
    assert made[0].read.count(COUNT - 1) == 1
    streams_of(model).close()


def test_what_a_pass_will_take_is_told_by_a_read_or_two_and_no_pass_begins_by_it(tmp_path):
    made = []
    model = opened(write(tmp_path), "full_stream", lambda arranged: made.append(Counted(arranged)) or made[0])
    streams_of(model).measured((1,))  # which fills the slots
    before, scheduler = len(made[0].read), streams_of(model).scheduler
    assert expected_s(model) > 0
    assert len(made[0].read) - before <= 2  # the one that it times, and the one that made room for it
    assert scheduler.first_s is None and not scheduler.hits and not any(scheduler.waited_s.values())
    streams_of(model).close()


def test_what_a_streamed_model_published_is_found_by_the_one_in_memory(tmp_path):
    home = write(tmp_path)
    streamed, ids, identities = opened(home, "ffn_only_stream"), prompt(100), []
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with kvclient.InMemoryClient(32 << 20) as client:
        for model, reused in ((streamed, 0), (in_memory(home, torch.float32), 96)):
            plain = model.generate(ids, **options)
            with kvclient.hf.attach(model, client, block_tokens=32) as kv:
                assert torch.equal(model.generate(ids, **options), plain)
                assert (kv.last.bypassed, kv.last.reused_tokens) == (None, reused)
                identities.append(kv.identity)
                model.generate(ids, **options)
                assert (kv.last.bypassed, kv.last.reused_tokens) == (None, 96)
    assert identities[0] == identities[1]
    streams_of(streamed).close()


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvclient-streaming")]


def refusing(arranged):
    return DiskMover(*arranged.paths, faults="read_eio=@1+")


def test_a_load_that_fails_ends_its_threads(tmp_path):
    home, before = write(tmp_path), len(readers())
    streams_of(opened(home, "full_stream")).close()
    with pytest.raises(StreamingFailed, match="layer 0"):
        opened(home, "full_stream", refusing)
    with pytest.raises(InvalidArgument, match="host_threads"):
        StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream", host_threads=1))
    assert len(readers()) == before


def test_what_is_streamed_begins_to_come_while_what_stays_does(tmp_path):
    """The first layer stays; its reads wait for those of one that does not."""
    begun = threading.Event()

    class Waits(Counted):
        def fill(self, layer, pieces, slot):
            if layer in (2, 3):
                begun.set()
            assert begun.wait(60), f"layer {layer} is read before any that is streamed"
            super().fill(layer, pieces, slot)

    config = StreamingConfig(residency="partial_resident", keep_first_k=2, keep_last_k=0)
    model = StreamingCausalLM.from_pretrained(write(tmp_path), config, mover=Waits)
    logits(model, prompt(5))
    streams_of(model).close()


def test_a_plain_model_of_which_some_is_streamed_stays_as_it_is(tmp_path):
    """Its layers that stay were computed by the kernels then, and the others by torch."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=COUNT, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    wanted = logits(opened(tmp_path, "full_resident"), prompt(20))
    for residency in ("partial_resident", "ffn_only_stream", "full_stream"):
        model = opened(tmp_path, residency)
        assert layers.install(model) == 0
        assert torch.equal(logits(model, prompt(20)), wanted), residency
        streams_of(model).close()
    assert layers.install(opened(tmp_path, "full_resident"))


@pytest.mark.parametrize("strange", [0, 2])
def test_a_layer_with_a_forward_of_its_own_is_computed_by_it(tmp_path, monkeypatch, strange):
    """Another of its kind had been proven; what stood over the module never called it."""
    home, usual = write(tmp_path), transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer.__init__

    def made(self, config, layer_idx):
        usual(self, config, layer_idx)
        if layer_idx == strange:
            forward = self.mlp.forward
            self.mlp.forward = lambda x: 3 * forward(x)

    monkeypatch.setattr(transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer, "__init__", made)
    wanted, plain = in_memory(home, torch.float32), awq.from_pretrained(home, torch.float32)
    assert torch.allclose(logits(wanted, prompt(5)), logits(plain, prompt(5)), atol=1e-3)
    for residency in RESIDENCIES:
        model = opened(home, residency)
        assert torch.equal(logits(model, prompt(5)), logits(wanted, prompt(5))), residency
        streams_of(model).close()


def test_nothing_is_proven_while_a_hook_of_all_modules_watches(tmp_path):
    home = write(tmp_path)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        model = opened(home, "full_stream")
        wanted = awq.from_pretrained(home, torch.float32)
        assert layers.install(wanted.model.layers) == 0
    finally:
        handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(logits(model, prompt(5)), logits(wanted, prompt(5)))
    streams_of(model).close()
