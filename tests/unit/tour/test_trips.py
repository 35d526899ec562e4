"""Goal: docs/tour.md lists every Python file that a put, a get, a warm generate, a disk load, an attention
call and the daemon's start pass, in order, and the short trips stay short.

Method: each trip is made, on a real daemon and a tiny model, and recorded (tests/unit/tour/trips.py); what
was recorded must be what the page says. Only what is warm is recorded: a first call also attaches.
"""

import contextlib
import json
import os
import sys

import pytest
import torch

import kvclient
from kvclient.testing.conformance.case import new_keys
from tests.fault.disks.rig import BLOCK
from tests.hf.zoo import build, prompt
from tests.unit.tour import trips

MOST = {  # of issue 19
    "put": 10, "get": 10, "a load from disk": 10, "a warm generate": 16, "an attention call": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def verdicts(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCLIENT_VERDICTS_DIR", str(tmp_path / "verdicts"))


def put(client, layout, keys):
    with client.create(keys, layout) as writer:
        for index in writer.granted:
            for layer in range(BLOCK.num_layers):
                writer[index].layer(layer)[...] = 1


def get(client, keys, **options):
    with client.get(keys, **options) as blocks:
        assert blocks[0] is not None
        blocks[0].layer(0)


def of_the_client(rig) -> dict[str, list[str]]:
    with contextlib.closing(kvclient.connect(rig.daemon.dir)) as client:
        layout = client.register_layout(BLOCK.to_blob())
        warming, keys = new_keys(1), new_keys(1)
        put(client, layout, warming)
        get(client, warming)
        with trips.recorded() as putting:
            put(client, layout, keys)
        with trips.recorded() as getting:
            get(client, keys)
        on_disk = rig.put_on_disk(1)
        rig.evict()
        with trips.recorded() as loading:
            get(client, on_disk, wait_s=10)
    return {"put": putting, "get": getting, "a load from disk": loading}


def of_a_model() -> dict[str, list[str]]:
    model, ids = build("llama"), prompt(70)
    with (
        kvclient.InMemoryClient(64 << 20) as client,
        kvclient.hf.attach(model, client, block_tokens=16, self_test=False, in_place=True) as kv,
    ):
        plain = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
        for _ in range(2):
            model.generate(ids, **plain, pad_token_id=0)
        with trips.recorded() as generating:
            model.generate(ids, **plain, pad_token_id=0)
        assert kv.last.reused_tokens == 64
        with trips.recorded("kvclient/hf/attention/registered.py:attention") as attending:
            model.generate(ids, **plain, pad_token_id=0)
    return {"a warm generate": generating, "an attention call": attending}


def of_the_start(daemon, tmp_path) -> list[str]:
    out = tmp_path / "start.json"
    made = daemon(start=False)
    made.command = [sys.executable, "-m", "tests.unit.tour.trips", str(out)]
    made.start()
    return json.loads(out.read_text())


def test_the_tour_lists_the_files_of_each_trip(rig, daemon, tmp_path):
    made = {**of_the_client(rig("")), **of_a_model(), "the daemon's start": of_the_start(daemon, tmp_path)}
    if os.environ.get("WRITE_TRIPS"):
        trips.write(made)
    assert trips.written() == trips.section(made)
    for name, most in MOST.items():
        assert len(made[name]) <= most, f"{name} passes {len(made[name])} files, limit {most}"
