"""Proves that where a layer is computed is chosen by what was measured, and changes no bit.

Method: the choice by itself, on costs that are given; then packed models whose weights lie in memory, with
costs that send all layers, some, or those of few rows to the host; two threads, one on each side.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import (
    StreamingCausalLM,
    StreamingConfig,
    StreamingFailed,
    expected_s,
    host_memory,
    streaming_stats,
)
from kvclient.hf.streaming.placement import costs as measured
from kvclient.hf.streaming.placement.costs import Costs
from kvclient.hf.streaming.progress import expected
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.streams import Streams
from tests.hf.awq_checkpoint import write_checkpoint

LAYERS = 6
PROMPT = torch.arange(5, 25)[None]
MOVED = dict.fromkeys(range(LAYERS), 1000)


def costs(link_s, device_s, host_s):
    """Of a layer of 1,000 bytes, the same for any number of rows."""
    return Costs(1000 / link_s, {1: device_s}, None if host_s is None else {1: host_s})


def test_rounds_beside_other_work_do_not_count(monkeypatch):
    """The median of three said four times what a product took, where two of them met another process."""
    clock = iter([0, 9, 9, 18, 18, 20, 20, 29, 29, 38])  # seconds: the third round takes 2
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: next(clock)))  # no one else's
    assert measured.products_s(torch.nn.Linear(4, 4), torch.get_num_threads(), (1,)) == {1: 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    return write_checkpoint(tmp_path_factory.mktemp("packed"), model, 32)


def opened(home, monkeypatch, costs, mover=host_memory, **config):
    monkeypatch.setattr(Streams, "measured", lambda self, rows: costs)
    config = StreamingConfig(residency="full_stream", host_threads=2, **config)
    return StreamingCausalLM.from_pretrained(home, config, mover=mover)


def logits(model, prompt=PROMPT):
    with torch.inference_mode():
        return model(prompt).logits


def ends(found, costs, slots, turns=50):
    """Seconds of so many passes by a choice, in a simulation of its own."""
    now, link, freed = 0.0, 0.0, [0.0] * slots
    for _ in range(turns):
        for layer, length in MOVED.items():
            if found[layer] == "host":
                now += costs.seconds("host", 1)
                continue
            link = max(link, freed.pop(0)) + length / costs.link
            now = max(now, link) + costs.seconds("device", 1)
            freed.append(now)
    return now


def test_each_layer_is_computed_where_it_ends_first():
    everywhere = {where: dict.fromkeys(MOVED, where) for where in ("host", "device")}
    assert costs(1, 0.1, None).choose(MOVED, 2, 1) == everywhere["device"]
    assert costs(1, 0.1, 0.05).choose(MOVED, 2, 1) == everywhere["host"]
    assert costs(0.1, 0.1, 5).choose(MOVED, 2, 1) == everywhere["device"]
    both = costs(1, 0.1, 0.8)  # the link carries one layer while the host computes another
    found = both.choose(MOVED, 2, 1)
    assert {"host", "device"} == set(found.values())
    for pure in everywhere.values():
        assert ends(found, both, 2) < 0.9 * ends(pure, both, 2)


def test_many_rows_go_where_they_are_cheap():
    costs = Costs(1000, {1: 0.01, 16: 0.02}, {1: 0.1, 16: 1.6})
    assert set(costs.choose(MOVED, 2, 1).values()) == {"host"}
    assert "device" in costs.choose(MOVED, 2, 64).values()
    assert costs.seconds("host", 2) == 1.6 and costs.seconds("host", 64) == pytest.approx(6.4)


@pytest.mark.parametrize(
    "link_s, device_s, host_s, on_host", [(1, 0.1, 5, "none"), (1, 0.1, 0.8, "some"), (1, 0.1, 0.01, "all")]
)
def test_no_choice_changes_a_bit(home, monkeypatch, link_s, device_s, host_s, on_host):
    plain = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_resident"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want, said = logits(plain), plain.generate(PROMPT, **options)
    length = streaming_stats(opened(home, monkeypatch, costs(1, 1, None)))["bytes_per_pass"] / LAYERS
    fitted = Costs(length / link_s, {1: device_s, 16: device_s, 32: device_s}, {1: host_s, 32: host_s})
    model = opened(home, monkeypatch, fitted)
    threads = torch.get_num_threads()
    assert torch.equal(logits(model), want) and torch.equal(model.generate(PROMPT, **options), said)
    assert torch.get_num_threads() == threads
    stats = streaming_stats(model)
    assert all(value.is_meta for value in model.model.layers.state_dict().values())
    computed = stats["placement"]["computed_on_host"]
    assert {"none": computed == 0, "all": computed == 7 * LAYERS}.get(on_host, 0 < computed < 7 * LAYERS)
    # What the host computes is not brought, but for what was on its way when the choice was first made.
    assert stats["loads"] <= 7 * LAYERS - computed + 4
    assert all(slot.users == 0 for slot in streams_of(model).scheduler.slots)
    streams_of(model).close()


def test_both_sides_at_one_time(home, monkeypatch):
    """One row on the host, twenty on the device, by two threads: a layer's weights are never another's."""
    costs = Costs(1e12, {1: 1e-3, 32: 1e-3}, {1: 1e-6, 2: 10.0})
    model = opened(home, monkeypatch, costs)
    want, short = logits(model), logits(model, PROMPT[:, :1])
    wrong, failed = [], []

    def passes(prompt, wanted):
        try:
            for _ in range(30):
                if not torch.equal(logits(model, prompt), wanted):
                    wrong.append(prompt.shape)
        except Exception as error:
            failed.append(error)

    work = [(PROMPT, want), (PROMPT[:, :1], short), (PROMPT, want), (PROMPT[:, :1], short)]
    threads = [threading.Thread(target=passes, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong and not failed
    assert streaming_stats(model)["placement"]["computed_on_host"] > 0
    assert all(slot.users == 0 for slot in streams_of(model).scheduler.slots)
    streams_of(model).close()


def test_an_exception_on_the_host_gives_threads_and_weights_back(home, monkeypatch):
    model = opened(home, monkeypatch, costs(1, 1, 1e-9))
    want, threads = logits(model), torch.get_num_threads()

    def fails(_module, _args):
        raise RuntimeError("in the middle")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        logits(model)
    handle.remove()
    assert torch.get_num_threads() == threads
    assert all(value.is_meta for value in model.model.layers.state_dict().values())
    assert torch.equal(logits(model), want)
    streams_of(model).close()


def test_what_lies_in_memory_is_compared_before_the_host_computes_with_it(home, monkeypatch):
    made = []

    def flipped(arranged):
        made.append(host_memory(arranged))
        piece = arranged.layers[3]["ffn"].pieces[0]
        made[0]._image[piece.offset + 100] ^= 1
        return made[0]

    model = opened(home, monkeypatch, costs(1, 1, 1e-9), mover=flipped)
    with pytest.raises(StreamingFailed, match="layer 3"):
        logits(model)
    streams_of(model).close()


def test_it_is_measured_at_start_and_said(home, tmp_path):
    config = StreamingConfig(residency="full_stream", host_threads=1)
    model = StreamingCausalLM.from_pretrained(home, config, mover=host_memory)
    logits(model)
    said = streaming_stats(model)["placement"]
    assert said["link_bytes_per_s"] > 0 and set(said["host_s"]) == set(said["device_s"]) == {1, 4, 16}
    assert sum(said["chosen"][PROMPT.numel()].values()) == LAYERS
    assert expected_s(model) > 0
    streams_of(model).close()
    plain = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_resident"))
    assert expected_s(plain) is None and "placement" not in streaming_stats(plain)
    with pytest.raises(InvalidArgument, match="host_threads=1; the host computes what lies in its memory"):
        StreamingCausalLM.from_pretrained(home, config)
    with pytest.raises(InvalidArgument, match="host_threads=0"):
        StreamingConfig(host_threads=0)


def test_what_is_expected_is_said_with_what_the_host_computes():
    stats = {"bytes_held": 5 << 20, "bytes_per_pass": 3 << 20}
    assert expected(stats, None) == "holds 5 MiB, reads 3 MiB a token"
    said = expected(stats | {"placement": {"chosen": {1: {"host": 22, "device": 22}}}}, 0.1)
    assert "3 MiB a token but for 22 of 44 layers, which the host computes" in said
    assert said.endswith("; expects 10.00 tokens a second")
