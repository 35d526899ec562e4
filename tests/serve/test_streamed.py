"""Proves that a server of a model whose layers are read from the disk answers as one whose model is in
memory, and that a request for which its memory has no room is a 413 with the longest that fits, before it is
computed.

Method: real servers on the tiny model, its positions raised so that memory ends before they do; then the sum
of what is planned, and what a job hears of a pass that was refused after all.
"""

import json
import queue
import shutil

import pytest
import torch

import kvclient
from kvclient.errors import InvalidArgument
from kvclient.hf import Engine, Repair
from kvclient.hf.reuse import products
from kvclient.hf.streaming import Admission, RequestTooLarge, StreamingConfig
from kvclient.hf.streaming.planner.asked import asked_of
from kvclient.kernels import contract
from kvclient.serve.engine.job import Failed
from kvclient.serve.engine.loop import Loop
from kvclient.serve.scheduler import Limits
from kvclient.serve.streamed import limited, streamed
from tests.hf.inside import BLOCK, COMPUTED, DOCUMENT
from tests.hf.zoo import prompt
from tests.serve.conftest import Server
from tests.serve.loop.test_loop import ask, ended

MEMORY = 300 << 20
POSITIONS = 1 << 20


@pytest.fixture(scope="module")
def long(home, tmp_path_factory):
    place = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(home, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    return place


def test_it_says_what_one_in_memory_says_and_413_with_the_longest_that_fits(long):
    flags = ["--store", "64MiB", "--memory-tokens", str(POSITIONS), "--dtype", "float32"]
    plain, small = Server(long, *flags), Server(long, *flags, "--memory", "300MiB")
    try:
        for text in ("Rivers carry stones from the mountains", "to the sea"):
            wanted = plain.chat(text)["choices"][0]["message"]
            assert small.chat(text)["choices"][0]["message"] == wanted
        status, _, said = small.post("/v1/completions", {"prompt": [5] * 200_000, "max_tokens": 10})
        assert status == 413 and "the longest prompt that fits has" in said["error"]["message"]
        assert said["error"]["code"] == "context_length_exceeded"
    finally:
        small.end()
        plain.end()


def test_requests_share_what_the_layers_leave(long):
    options, client = {"block_tokens": 16, "self_test": False}, kvclient.InMemoryClient(16 << 20)
    with streamed(str(long), client, "float32", "auto", MEMORY, options) as engine:
        whole = Limits(memory_tokens=POSITIONS)
        limits = limited(engine, whole)
        tokens = limits.memory_tokens
        assert 1000 < tokens < POSITIONS and limited(engine, Limits(memory_tokens=64)).memory_tokens == 64
        rows, piece = limits.max_batch, limits.piece_tokens * 9 // 8
        pass_of = Admission(engine.model, MEMORY, piece + rows)
        beside = (rows - 1) * pass_of.estimate(1, 0).logits
        assert pass_of.estimate(tokens, 0).bytes + beside <= MEMORY
        assert pass_of.estimate(tokens + 1, 0).bytes + beside > MEMORY
        assert asked_of(engine.model).pieces == piece
        with pytest.raises(RequestTooLarge) as told:
            engine.generate([5] * POSITIONS, 1)
        assert Failed.of(told.value).status == 413 and "fits has" in Failed.of(told.value).message
        with pytest.raises(InvalidArgument, match="leaves no room for a request of 65536 rows"):
            limited(engine, Limits(max_batch=1024, step_tokens=64, memory_tokens=POSITIONS))
    with pytest.raises(InvalidArgument, match="--memory with --device xpu; it must be one of cpu, cuda"):
        streamed(str(long), client, "float32", "xpu", MEMORY, options)
    with Engine.from_pretrained(long, client, **options) as engine:
        assert limited(engine, whole) is whole


def test_on_a_gpu_it_streams_to_that(long, monkeypatch):
    seen = []

    def opened(_model, _client, streaming, **_):
        seen.append(streaming)
        raise InvalidArgument("as far as this test goes")

    monkeypatch.setattr(Engine, "from_pretrained", opened)
    for device in ("cuda:1", "cpu", "auto"):
        with pytest.raises(InvalidArgument, match="as far"):
            streamed(str(long), None, "float16", device, MEMORY, {})
    assert [config.device for config in seen] == ["cuda:1", "cpu", "cpu"]
    assert {config.memory for config in seen} == {MEMORY}


def test_an_answer_behind_products_that_are_rounded_is_nobodys_prefix(long, monkeypatch):
    """Documents that changed places: no token is found then, and none is exact."""
    if not products.available():
        pytest.skip("no kernels here")
    monkeypatch.setattr(products, "IN_PAIRS", (contract.auto_path(),))  # a processor of bf16 in pairs
    other, repair = prompt(96, seed=15), Repair(caution=1.0, behind_tokens=90)
    before = torch.cat([prompt(130, seed=21), other, prompt(20, seed=3)], dim=1)
    swapped = torch.cat([prompt(13, seed=7), other, DOCUMENT, prompt(9, seed=4)], dim=1)
    options = {"block_tokens": BLOCK, "self_test": False, "repair": repair}
    client = kvclient.InMemoryClient(16 << 20)
    streaming = StreamingConfig(residency="ffn_only_stream", n_staging_slots=2)
    with Engine.from_pretrained(long, client, dtype="float32", streaming=streaming, **options) as engine:
        loop, events, kept = Loop(engine.model, engine.kv, Limits()), queue.Queue(), []
        for ids in (COMPUTED, before, swapped):
            job = ask(loop, ids, events, len(kept))
            ended(events, 1)
            kept.append(loop.stats()["blocks_of_answers_total"])
        assert not job.exact and 0 < kept[0] < kept[1] == kept[2]
        loop.close()


def test_what_raises_for_its_size_is_no_fault_of_the_server():
    assert Failed.of(InvalidArgument("x")).status == 400
    assert Failed.of(ValueError("x")).status == 500
    assert StreamingConfig(room_tokens=1).room_tokens == 1
    with pytest.raises(InvalidArgument, match="room_tokens=0"):
        StreamingConfig(room_tokens=0)
