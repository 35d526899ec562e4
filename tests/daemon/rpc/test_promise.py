"""Goal: the names, defaults and shapes that users were promised are there, through a real daemon and through
the fake alike. Method: the promised lines one after the other, for each dtype; the program without a
model of docs/choose.md as it stands there.
"""

import hashlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import kvclient
from kvclient.errors import InvalidArgument

NAN = float("nan")
ROOT = Path(__file__).resolve().parents[3]
IDENTITY = bytes(range(32))
# dtype of a layout -> of .layer(), of .tensor()
DTYPES = {
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
    "float16": (np.float16, torch.float16),
    "float32": (np.float32, torch.float32),
    "int8": (np.int8, torch.int8),
    "uint8": (np.uint8, torch.uint8),
}
FIGURES = {
    "used_bytes", "capacity_bytes", "faulted_bytes", "blocks", "pins", "sessions",
    "hits", "misses", "evictions",
}  # fmt: skip
LAYERS, HEADS, DIM, TOKENS = 4, 2, 8, 16
SHAPE = (2, HEADS, TOKENS, DIM)


@pytest.fixture(params=["daemon", "fake"])
def two_clients(request, daemon):
    if request.param == "daemon":
        started = daemon(memory="16MiB")
        with started.connect() as first, started.connect() as second:
            yield first, second
    else:
        with kvclient.InMemoryClient(16 << 20) as first, first.another() as second:
            yield first, second


def defaults(call) -> dict[str, object]:
    return {
        name: about.default
        for name, about in inspect.signature(call).parameters.items()
        if about.default is not inspect.Parameter.empty
    }


def test_the_defaults_are_the_promised_ones():
    promised = {"dir": None, "namespace": "default", "on_error": "raise", "timeout_s": 5.0}
    assert promised.items() <= defaults(kvclient.connect).items()
    assert list(inspect.signature(kvclient.connect).parameters)[:4] == list(promised)
    assert {"dtype": "bfloat16", "block_tokens": 128}.items() <= defaults(kvclient.Layout).items()
    chain = {"block_tokens": 128, "extra_ids": None, "partial": False}
    assert chain.items() <= defaults(kvclient.chain).items()
    assert {"priority": 35, "ttl_s": None}.items() <= defaults(kvclient.KVClient.create).items()


def test_a_wait_for_no_number_of_seconds_is_refused(two_clients):
    client, other = two_clients
    layout = kvclient.Layout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS)
    chain = kvclient.chain(IDENTITY, list(range(TOKENS)), block_tokens=TOKENS)
    with client.create(chain, client.register_layout(layout)) as writer:
        pending = other.create(chain, other.register_layout(layout))
        with other.get(chain, follow=True) as blocks:
            for wait in (
                lambda: blocks.wait_layer(0, timeout_s=NAN),
                lambda: blocks[0].wait_layer(0, timeout_s=NAN),
                lambda: pending.wait_pending(timeout_s=NAN),
            ):
                with pytest.raises(InvalidArgument, match="nan"):
                    wait()
        writer.abort()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_promised_lines(two_clients, dtype):
    client, other = two_clients
    of_arrays, of_tensors = DTYPES[dtype]
    layout = kvclient.Layout(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype, block_tokens=TOKENS
    )
    layout_id = client.register_layout(layout)
    chain = kvclient.chain(IDENTITY, list(range(3 * TOKENS + 5)), block_tokens=TOKENS)
    assert len(chain) == len(chain.keys) == len(chain.content_keys) == len(chain.fingerprints) == 3
    assert isinstance(chain[:2], kvclient.Chain) and chain[:2].keys == chain.keys[:2]

    with client.create(chain, layout_id, priority=35, ttl_s=None) as writer:
        assert writer.results == ["granted"] * 3 and writer.granted == [0, 1, 2]
        with other.get(chain, follow=True) as blocks:
            for layer in range(LAYERS):
                for i in writer.granted:
                    assert writer[i].layer(layer).shape == SHAPE and writer[i].layer(layer).flags.writeable
                    assert writer[i].tensor(layer).shape == SHAPE
                    writer[i].layer(layer)[...] = 10 * i + layer
                    writer[i].mark_layer(layer)
                blocks.wait_layer(layer, timeout_s=10.0)
                blocks[0].wait_layer(layer, timeout_s=10.0)
                assert (blocks[2].layer(layer) == 20 + layer).all()
        length = sum(layout.layer_length(layer) for layer in range(LAYERS))  # multiples of 512: no padding
        assert writer[0].view.nbytes == length and not writer[0].view.readonly
        found = other.lookup(chain)
        assert (found.resident, found.pending, found.on_disk, list(found.states)) == (0, 3, 0, [1] * 3)
        assert other.create(chain, other.register_layout(layout)).results == ["pending"] * 3
        assert writer.wait_pending(timeout_s=1.0)
    for keys in (chain, chain.keys, tuple(chain.keys), chain.packed_keys):
        assert other.lookup(keys).resident == 3

    missing = bytes(32)
    with other.get([*chain.keys, missing]) as blocks:
        assert blocks[3] is None
        for i, block in enumerate(blocks[:3]):
            assert isinstance(block.view, memoryview) and block.view.readonly and block.view.nbytes == length
            array, tensor = block.layer(3), block.tensor(3)
            assert isinstance(array, np.ndarray) and array.dtype == of_arrays and array.shape == SHAPE
            assert tensor.dtype == of_tensors and tensor.shape == SHAPE
            assert (array == 10 * i + 3).all()
            assert tensor.data_ptr() == array.ctypes.data, "zero-copy"
            at = layout.layer_offset(3)
            assert bytes(block.view[at : at + array.nbytes]) == array.tobytes()
            del block, array, tensor
    assert client.touch(chain) == 3
    stats = client.stats()
    assert stats.keys() >= FIGURES and all(isinstance(stats[name], int) for name in FIGURES)
    assert client.delete(chain) == 3 and other.lookup(chain).resident == 0
    client.close()


def test_the_documented_program_runs_as_it_stands(daemon, tmp_path):
    page = (ROOT / "docs/choose.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (example,) = [code for code in examples if "register_layout" in code]
    program = tmp_path / "example.py"
    program.write_text(example)
    started = daemon(memory="64MiB")
    ran = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"KVSTORED_DIR": str(started.dir), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (0, "7 of 7 blocks, (2, 3, 128, 64)\n"), ran.stderr
    identity = hashlib.sha256(b"my model, revision 1").digest()
    with started.connect() as client, client.get(kvclient.chain(identity, list(range(1000)))) as blocks:
        assert all(0 < block.layer(29).mean() < 1 and block.verify() for block in blocks)
        del blocks
    assert len(kvclient.chain(identity, list(range(127)))) == 0
    assert kvclient.chain(identity, list(range(127)), partial=True).token_counts == [127]
