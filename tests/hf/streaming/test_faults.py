"""Proves that a disk that fails, is slow or returns other bytes gives the right token or a typed error, never
another token; and what happens to a checkpoint under the hands of others.

Method: a tiny llama read through the schedule of faults of native/core/files/faults.h, bit for bit beside the
model in memory; files truncated, replaced and rearranged by two processes while a model runs; a file system
of 1 MiB; a hub id with no network.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import DiskMover, StreamingCausalLM, StreamingConfig, StreamingFailed
from kvclient.hf.streaming.files.checkpoint import fetched
from kvclient.hf.streaming.files.index import BLOCK_BYTES, Table
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.registry import streams_of
from kvclient.hf.streaming.weights.vocabulary import StreamedEmbedding
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint
from tests.warm_python import ROOT, WarmPython
from tests.warm_python import run as run_warm

CLONE_NEWNS = 0x00020000
PROMPT = torch.arange(1, 25)[None]
FULL = StreamingConfig(residency="full_stream", n_staging_slots=3)
FULL_RESIDENT = StreamingConfig(residency="full_resident")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("awq")
    write_checkpoint(home, tiny_llama(), 32)
    return home


def opened(home, config=FULL, **more):
    return StreamingCausalLM.from_pretrained(home, config, **more)


def logits(model):
    with torch.inference_mode():
        return model(PROMPT).logits


@pytest.fixture(scope="module")
def want(home):
    return logits(opened(home, FULL_RESIDENT))


def faulty(home, schedule):
    return opened(home, mover=lambda streams: DiskMover(*streams.paths, faults=schedule))


@pytest.mark.parametrize("fault", ["eio", "flip"])
def test_what_fails_once_is_read_again(home, want, fault):
    model = faulty(home, f"read_{fault}=@9")  # behind the embedding and the first slots
    for _ in range(3):
        assert torch.equal(logits(model), want)
    assert streams_of(model).scheduler.retries == 1
    streams_of(model).close()


def test_bytes_that_changed_on_the_disk_are_never_computed_with(checkpoint):
    """Where nothing is read ahead each pass reads every layer, so the first one fails. Else a layer may still
    lie in its slot, right, in as many passes as what is read ahead comes too late to take that slot.
    """
    first = StreamingConfig(residency="full_stream", prefetch_layers_ahead=0)
    reading, ahead = opened(checkpoint, first), opened(checkpoint)
    path, right = checkpoint / "kvstored-streaming.bin", logits(opened(checkpoint, FULL_RESIDENT))
    index = json.loads((checkpoint / "kvstored-streaming.json").read_text())
    begin, length = index["layers"][2]["ffn"]["piece"][:2]
    whole, at = path.read_bytes(), begin + length // 2

    def fails(words):
        with pytest.raises(StreamingFailed, match=rf"kvstored-streaming\.bin, layer 2, offset \d+: {words}"):
            logits(reading)
        for _ in range(3):
            with contextlib.suppress(StreamingFailed):
                assert torch.equal(logits(ahead), right)

    try:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        fails("the bytes")
        os.truncate(path, at)
        fails("the file ends")
    finally:
        path.write_bytes(whole)
    for model in (reading, ahead):
        assert torch.equal(logits(model), right)
        streams_of(model).close()


class FailsFrom:
    """Rows of zeros, as long as they lie before an offset."""

    def __init__(self, offset):
        self.offset = offset

    def fill(self, layer, pieces, slot):
        if pieces[0].offset >= self.offset:
            raise StreamingFailed("file", layer, pieces[0].offset, "no")
        slot[:] = bytes(len(slot))


def test_rows_that_fail_in_one_thread_take_nothing_from_another():
    """It stands between the reading of its rows and their use."""
    width = BLOCK_BYTES // 4
    whole = Piece(0, 2 * BLOCK_BYTES, None)
    table = Table("rows", "float32", (2, width), 0, whole.length, 2, (whole,), (0, 0))
    module, stands, goes_on, found = torch.nn.Embedding(1, 1), threading.Event(), threading.Event(), []
    StreamedEmbedding(module, table, FailsFrom(BLOCK_BYTES), 0)

    def wait(*_):
        stands.set()
        goes_on.wait(60)

    module.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: found.append(module(torch.tensor([0]))))
    thread.start()
    try:
        assert stands.wait(60)
        with pytest.raises(StreamingFailed):
            module(torch.tensor([1]))
    finally:
        goes_on.set()
        thread.join(60)
    assert len(found) == 1 and not found[0].is_meta and found[0].shape == (1, width)
    assert module.weight.is_meta


@pytest.mark.parametrize(("fault", "words"), [("eio", "Input/output"), ("flip", "bytes are others")])
def test_what_goes_on_failing_is_an_error_that_names_the_place(home, want, fault, words):
    model = faulty(home, f"read_{fault}=@13+")
    streams = streams_of(model)
    seen = []
    for _ in range(4):
        try:
            assert torch.equal(logits(model), want)
        except StreamingFailed as error:
            seen.append(error)
    assert seen and all(error.path.name == "kvstored-streaming.bin" for error in seen)
    assert all(f"layer {error.layer}, offset {error.offset}: " in str(error) for error in seen)
    assert all(words in str(error) and 0 <= error.layer < 5 for error in seen)
    assert all(slot.users == 0 for slot in streams.scheduler.slots)
    streams.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_disk_at_random_gives_the_right_answer_or_an_error(home, want, seed):
    model = faulty(home, f"seed={seed},read_eio=0.1,read_flip=0.1,read_short=0.2,read_full=0.1")
    right = wrong = 0
    for _ in range(25):
        try:
            answer = logits(model)
        except StreamingFailed:
            wrong += 1
        else:
            right += torch.equal(answer, want)
    assert right + wrong == 25 and right and wrong
    streams_of(model).close()


def test_a_slow_disk_is_waited_for(home, want):
    """The reads of a layer end only when the test says so."""
    gate = threading.Semaphore(0)

    class Slow(DiskMover):
        def fill(self, layer, pieces, slot):
            super().fill(layer, pieces, slot)
            slot_bytes = bytes(slot)
            slot[:] = bytes(len(slot))  # who looks before fill() returns sees nothing
            assert gate.acquire(timeout=60)
            slot[:] = slot_bytes

    model = opened(home, mover=lambda streams: Slow(*streams.paths))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(logits(model)))
    thread.start()
    while thread.is_alive():
        gate.release()
        thread.join(0.01)
    assert torch.equal(answers[0], want)
    assert sum(streams_of(model).scheduler.waited_s.values()) > 0
    for _ in range(8):
        gate.release()
    streams_of(model).close()


def test_close_ends_reads_and_who_waits(home):
    """Also with a read under way."""
    entered, model = threading.Event(), None

    class Held(DiskMover):
        def fill(self, layer, pieces, slot):
            entered.set()
            assert closing.wait(60)
            super().fill(layer, pieces, slot)

        def close(self):
            closing.set()
            super().close()

    closing, errors = threading.Event(), []
    model = opened(home, mover=lambda streams: Held(*streams.paths) if entered.clear() is None else None)

    def run():
        try:
            logits(model)
        except Exception as error:
            errors.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(60)
    streams_of(model).close()
    thread.join(60)
    assert errors == ["Closed"]


def test_a_checkpoint_replaced_while_it_runs(home, tmp_path, want):
    """The model goes on with what it has open; the next one is that of the new files."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((home / file).read_bytes())
    model = opened(tmp_path)
    assert torch.equal(logits(model), want)
    torch.manual_seed(4)
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path)).eval()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).unlink()
    write_checkpoint(tmp_path, other, 32)
    renewed = opened(tmp_path)  # writes a rearranged file of its own, at the same place
    assert torch.equal(logits(model), want)
    assert not torch.equal(logits(renewed), want)
    for streamed in (model, renewed):
        streams_of(streamed).close()


def test_what_was_rearranged_is_read_where_nothing_can_be_written(home, tmp_path, want):
    """As on an image that was made with it. Root may write to any directory: the lock cannot be opened."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((home / file).read_bytes())
    streams_of(opened(tmp_path)).close()
    lock = tmp_path / "kvstored-streaming.lock"
    lock.unlink()
    lock.mkdir()
    model = opened(tmp_path)
    assert torch.equal(logits(model), want)
    streams_of(model).close()


TWO = """
import sys, torch
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
told = []
model = StreamingCausalLM.from_pretrained(sys.argv[1], StreamingConfig(residency="full_stream"),
                                          progress=lambda done, whole: told.append(done))
with torch.inference_mode():
    answer = model(torch.arange(1, 25)[None]).logits
print(len(told), answer.double().sum().item())
"""


def test_of_two_processes_that_rearrange_one_waits(home, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((home / file).read_bytes())
    command = [sys.executable, "-c", TWO, str(tmp_path)]
    both = [WarmPython(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(count != "0" for count, _ in said) == [False, True]
    assert said[0][1] == said[1][1]
    assert sorted(path.suffix for path in tmp_path.glob("kvstored-*")) == [".bin", ".json", ".lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_an_error_that_names_the_file(home, tmp_path):
    program = f"""
import ctypes, runpy, shutil, subprocess, sys
import torch, transformers
words = lambda *_, **__: {{"input_ids": torch.ones(1, 1)}}
transformers.AutoTokenizer.from_pretrained = lambda *_, **__: words
if ctypes.CDLL(None).unshare({CLONE_NEWNS}):
    sys.exit("unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", {str(tmp_path)!r}], check=True)
for name in ("config.json", "model.safetensors"):
    shutil.copy({str(home)!r} + "/" + name, {str(tmp_path)!r})
sys.argv = ["kvclient.hf.streaming", {str(tmp_path)!r}, "--json"]
runpy.run_module("kvclient.hf.streaming", run_name="__main__")
"""
    done = run_warm([sys.executable, "-c", program], cwd=ROOT, timeout=300)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    said = json.loads(done.stderr.splitlines()[-1])["error"]
    assert done.returncode == 1 and "kvstored-streaming.bin.part" in said and "No space left" in said


def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"fetched first.*hf download some/model"):
        StreamingCausalLM.from_pretrained("some/model")


@pytest.mark.parametrize("name", ["some--user/model", "some/model.git", "some/.model"])
def test_what_no_hub_can_have_is_no_error_of_the_hubs_library(name):
    assert fetched(name) is None
    with pytest.raises(InvalidArgument, match=name):
        StreamingCausalLM.from_pretrained(name)
