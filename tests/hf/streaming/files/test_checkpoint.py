"""Proves that a checkpoint which lost a packed tensor, or is replaced while it is read, is an error that
names it and never weights of two; and that of two who rearrange one waits.

Method: real safetensors files, tiny; they are replaced, and a second one begins, from inside the first one's
progress. Whoever waits for a lock is seen in /proc/locks.
"""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvclient.errors import InvalidArgument
from kvclient.hf import awq
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, StreamingFailed
from kvclient.hf.streaming.files.in_place import in_place
from kvclient.hf.streaming.files.index import NAME
from kvclient.hf.streaming.files.rearrange import arrangement
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint

PROMPT = torch.arange(1, 25)[None]
LAYER = "model.layers.1.mlp.up_proj"
DEADLINE_S = 60.0


def other_llama():
    model = tiny_llama()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model


def opened(home, rearranged=True, **more):
    config = StreamingConfig(residency="full_stream", rearrange=rearranged)
    return StreamingCausalLM.from_pretrained(home, config, **more)


def logits(model):
    with torch.inference_mode():
        return model(PROMPT).logits


def changed(home, change):
    tensors = load_file(home / "model.safetensors")
    change(tensors)
    save_file(tensors, home / "model.safetensors")


@pytest.mark.parametrize("rearranged", [True, False])
@pytest.mark.parametrize("part, kind", [("qweight", "int32"), ("qzeros", "int32"), ("scales", "float16")])
def test_a_packed_tensor_that_is_lost_or_of_another_type_is_named(tmp_path, part, kind, rearranged):
    """Lost zero points were taken for eights, though the configuration has some: other weights, unsaid."""
    home = write_checkpoint(tmp_path, tiny_llama(), 32)
    changed(home, lambda tensors: tensors.update({f"{LAYER}.{part}": tensors[f"{LAYER}.{part}"].float()}))
    before = sorted(os.listdir(home))
    with pytest.raises(InvalidArgument, match=f"{LAYER}.{part} is float32; expected {kind}"):
        opened(home, rearranged)
    changed(home, lambda tensors: tensors.pop(f"{LAYER}.{part}"))
    if part == "qweight":
        return  # then nothing says that it is packed: test_streaming_files.py
    with pytest.raises(InvalidArgument, match=f"{LAYER}.{part} is missing; expected {kind}"):
        opened(home, rearranged)
    assert sorted(os.listdir(home)) == before


@pytest.mark.parametrize("rearranged", [True, False])
def test_a_checkpoint_without_zero_points_is_that_in_memory(tmp_path, rearranged):
    def without(tensors):
        for name in [name for name in tensors if name.endswith(".qzeros")]:
            del tensors[name]

    home = write_checkpoint(tmp_path, tiny_llama(), 32, {"zero_point": False}, without)
    model = opened(home, rearranged)
    assert torch.equal(logits(model), logits(awq.from_pretrained(home)))
    streams_of(model).close()


@pytest.fixture
def homes(tmp_path):
    """Of two checkpoints with the same shapes."""
    found = tmp_path / "is", tmp_path / "comes"
    for home, model in zip(found, (tiny_llama(), other_llama()), strict=True):
        home.mkdir()
        write_checkpoint(home, model, 32)
    return found


def test_a_checkpoint_replaced_while_it_is_rearranged_is_an_error(homes):
    """Some layers were of either, under the first one's index, and nothing said so."""
    home, comes = homes
    want = logits(awq.from_pretrained(comes))

    def replaces(done, whole):
        if done < whole and (comes / "model.safetensors").exists():
            os.replace(comes / "model.safetensors", home / "model.safetensors")

    with pytest.raises(
        StreamingFailed, match=r"model\.safetensors, .* it was replaced while it was read; load"
    ):
        opened(home, progress=replaces)
    assert sorted(path.suffix for path in home.glob("kvstored-*")) == [".lock"]
    model = opened(home)
    assert torch.equal(logits(model), want)
    streams_of(model).close()


def test_a_checkpoint_replaced_while_it_is_loaded_is_an_error(homes, monkeypatch):
    """Behind its headers, before what is outside of its layers was read: that was the other one's."""
    home, comes = homes

    def replaced(*asked):
        found = in_place(*asked)
        os.replace(comes / "model.safetensors", home / "model.safetensors")
        return found

    monkeypatch.setattr("kvclient.hf.streaming.model.in_place", replaced)
    with pytest.raises(StreamingFailed, match="it was replaced while it was read"):
        opened(home, rearranged=False)


def waits(path):
    """Whether somebody waits for a lock of this file."""
    inode = f":{path.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_of_two_who_rearrange_the_second_waits_and_reads_what_the_first_wrote(homes):
    """The second one begins in the middle of the first, and goes on when that has ended."""
    home, _ = homes
    seen, second = [], []

    def other():
        second.append(arrangement(home, progress=lambda *_: seen.append("written twice")))
        seen.append("second")

    def told(done, whole):
        if not done < whole or thread.ident is not None:
            return
        thread.start()
        ends = time.monotonic() + DEADLINE_S
        while not waits(home / f"{NAME}.lock"):
            assert thread.is_alive() and time.monotonic() < ends, "it does not wait"
        seen.append("waits")

    thread = threading.Thread(target=other)
    first = arrangement(home, progress=told)
    thread.join(DEADLINE_S)
    assert seen == ["waits", "second"] and second == [first]
