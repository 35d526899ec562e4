"""Proves that bench.gpu runs through and says what it found, before it meets a GPU.

Method: every row once, on the emulation, with small problems and a clock that calls each contender once; the
table and docs/gpu.md from such numbers, and from none. The document in the repository is the one that its
record stands for. On a GPU the benchmark itself is the test.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import attention as gpu_attention
from bench.gpu import clock as gpu_clock
from bench.gpu import moving as gpu_moving
from bench.gpu import streaming as gpu_streaming
from bench.gpu import ttft as gpu_ttft
from kvclient.hf.awq import linear
from kvclient.kernels import contract, cuda
from tests.gpu.conftest import REAL_CPU
from tests.hf.streaming.device.late import Late

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip
CEILINGS = {"read_bytes_s": 3e12, "copy_bytes_s": 2.5e12, "gemm_flop_s": 7e14, "pinned_bytes_s": 5e10}


@pytest.fixture
def small(device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("on a GPU the benchmark is run itself")

    def once(contenders):
        for calls in contenders.values():
            for call in calls if isinstance(calls, list) else [calls]:
                call()
        return dict.fromkeys(contenders, 2.0)

    monkeypatch.setattr(gpu_clock, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_clock, "timed", once)
    monkeypatch.setattr(gpu_clock, "walled", once)
    monkeypatch.setattr(gpu_clock, "sets_for", lambda count: 2)
    monkeypatch.setattr(gpu_moving, "LAYERS", 2)
    monkeypatch.setattr(gpu_moving, "TOKENS", 256)
    monkeypatch.setattr(gpu_moving, "BLOCKS", 2)
    monkeypatch.setattr(gpu_moving, "AWQ_SHAPES", [(256, 64)])
    monkeypatch.setattr(gpu_attention, "PREFILL_TOKENS", (64,))
    monkeypatch.setattr(gpu_attention, "APPEND_TOKENS", (16,))
    monkeypatch.setattr(gpu_attention, "CONTEXT", 128)
    monkeypatch.setattr(gpu_attention, "PREFILL", 1)  # the naive kernel knows every problem
    monkeypatch.setattr(gpu_attention, "DECODE", 1)
    monkeypatch.setattr(gpu_ttft, "TOKENS", (256,))
    monkeypatch.setattr(gpu_ttft, "MEMORY", "64MiB")
    monkeypatch.setattr(gpu_ttft, "SHAPE", TINY)


def test_a_streamed_model_runs_through(small, place, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(cuda, "DEVICES", ("cpu",))
    monkeypatch.setattr(linear, "_no_kernels", lambda device: None)
    found = gpu_streaming.measured(gpu_streaming.SMALL, Late(), 1 << 30, tokens=2)
    line = gpu.table({"rows": {"streamed": gpu_streaming.row(found)}}).splitlines()[-1]
    assert "not measured" not in line and "tokens/s" in line and "layers of 64 streamed" in line


@pytest.mark.parametrize("row", [row for row in gpu.ROWS if row.key != "streamed"], ids=lambda row: row.key)
def test_a_row_runs_through(small, row, monkeypatch):
    if row.key == "ttft":  # of a model whose attention a CPU computes
        monkeypatch.setattr(contract, "cpu", REAL_CPU)
    if row.key == "prefill_wgmma":
        pytest.skip("wgmma is not written: the row says so, and docs/gpu.md")
    if row.key in ("awq_many", "ttft"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    module = {
        "bench.gpu.attention": gpu_attention, "bench.gpu.moving": gpu_moving, "bench.gpu.ttft": gpu_ttft,
    }  # fmt: skip
    name, _, function = row.measure.partition(":")
    numbers = getattr(module[name], function)(CEILINGS)
    assert numbers and json.loads(json.dumps(numbers)) == numbers
    line = next(line for line in gpu.table({"rows": {row.key: numbers}}).splitlines() if row.what in line)
    assert "not measured" not in line and "µs" in line


def test_what_is_loaded_is_what_the_pool_holds(small):
    pool = gpu_moving.Pool(8)
    arrival = gpu_moving.Arrival(pool)
    arrival()
    codes = torch.from_numpy(pool.memory.copy()).reshape(2, 2, -1)[1, 1][: pool.parts[0]].reshape(8, 128, 128)
    wanted = (
        codes.float() * torch.tensor(0.01).half().float() + torch.tensor(0.01).half().float()
    ).bfloat16()
    assert arrival.bounced_bytes == 0 and not torch.equal(wanted[0], wanted[1])
    turned = wanted.float()  # by cos = sin = 1
    low, high = turned[..., :64], turned[..., 64:]
    exact = torch.cat([low - high, high + low], -1)
    assert (pool.cache[1, 0, :, 128:].float() - exact).abs().max() <= 0.05
    arrival.host.close()
    pool.close()


def test_every_row_is_named_without_a_gpu():
    text = gpu.document(None)
    assert all(row.what[1:] in text for row in gpu.ROWS)
    assert text.count("*Not measured*: no GPU so far") == len(gpu.ROWS)


def test_the_document_says_what_its_record_says():
    record = json.loads(gpu.RECORD.read_text()) if gpu.RECORD.exists() else None
    assert gpu.DOCUMENT.read_text() == gpu.document(record), "python -m bench.gpu --document writes it"


def test_a_record_becomes_a_document():
    about = {
        "device": "a device",
        "memory_gib": 80,
        "torch": "2",
        "cuda": "13",
        "commit": "abc",
        "when": "then",
    }
    rows = {
        "decode": {"8x32768": {"ours int8": {"us": 200.0, "of_read": 0.9}}},
        "load": {"not measured": "X: y"},
    }
    text = gpu.document({"machine": about, "ceilings": CEILINGS, "rows": rows, "seconds": 99.5})
    assert "then, commit abc, 99.5 s.\nOn: a device (80 GiB), torch 2, CUDA 13." in text
    assert "reading 3,000 GB/s" in text and "pinned to device 50.0 GB/s" in text
    assert "**8x32768**\n\n- ours int8: 200 µs, 90 % of read" in text
    assert "*Not measured*: X: y" in text and "not part of this run" in text
