"""Proves that a checkpoint read where it lies, with nothing written, gives the bits of a rearranged one.

Method: a tiny llama, packed and plain, in one file and in several with tensors at odd offsets, in a directory
that may not be written to; files that change, shrink or are of others under the running model.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, StreamingFailed, streaming_stats
from kvclient.hf.streaming.registry import streams_of

PROMPT = torch.arange(1, 25)[None]
RESIDENCIES = ("full_resident", "partial_resident", "ffn_only_stream", "full_stream")


def opened(checkpoint, residency="full_stream", **more):
    config = StreamingConfig(residency=residency, keep_first_k=1, keep_last_k=1, **more)
    return StreamingCausalLM.from_pretrained(checkpoint, config)


def logits(model):
    with torch.inference_mode():
        return model(PROMPT).logits


def copied(checkpoint, into):
    for file in ("config.json", "model.safetensors"):
        (into / file).write_bytes((checkpoint / file).read_bytes())
    return into


def scattered(checkpoint, into):
    """Three files, in each some tensors of every layer, behind a header of an odd length."""
    (into / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    names = {}
    tensors = load_file(checkpoint / "model.safetensors")
    for number in range(3):
        file = f"part-{number}.safetensors"
        part = {name: tensors[name] for i, name in enumerate(sorted(tensors)) if i % 3 == number}
        save_file(part, into / file)
        data = (into / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        odd = 5 + 2 * number  # so that no tensor begins where its type would have it
        text = data[8 : 8 + length] + b" " * odd
        (into / file).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        names |= dict.fromkeys(part, file)
    (into / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return into


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("lies", [copied, scattered])
def test_the_same_bits_and_nothing_written(checkpoint, tmp_path, residency, lies):
    want = logits(opened(checkpoint, "full_resident"))
    lies(checkpoint, tmp_path)
    before = sorted(os.listdir(tmp_path))
    model = opened(tmp_path, residency, rearrange=False)
    for _ in range(2):
        assert torch.equal(logits(model), want)
    assert sorted(os.listdir(tmp_path)) == before
    if residency == "full_stream":
        assert streaming_stats(model)["loads"] >= 5 + 4  # where reading ahead came late one lies in its slot
    streams_of(model).close()


def test_other_bytes_than_at_the_first_read_are_an_error(checkpoint, tmp_path):
    # Nothing is read ahead: so each pass reads every layer, and none lies in a slot that nobody took.
    model = opened(copied(checkpoint, tmp_path), rearrange=False, prefetch_layers_ahead=0)
    want = logits(model)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    wrong = bytearray(whole)
    wrong[len(whole) // 2] ^= 1
    path.write_bytes(wrong)  # into the same file
    with pytest.raises(StreamingFailed, match=r"layer \d, offset \d+: the bytes are others than at"):
        logits(model)
    os.truncate(path, len(whole) // 3)
    with pytest.raises(StreamingFailed, match=r"layer \d, offset \d+: the file ends \d+ bytes before"):
        logits(model)
    path.write_bytes(whole)
    assert torch.equal(logits(model), want)
    streams_of(model).close()


def test_scales_that_are_no_numbers_are_refused(checkpoint, tmp_path):
    tensors = load_file(copied(checkpoint, tmp_path) / "model.safetensors")
    if not (scales := [name for name in tensors if name.endswith(".scales")]):
        pytest.skip("a plain model has no scales")
    tensors[scales[0]][0, 0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=f"{scales[0]} has inf; all must be finite"):
        opened(tmp_path, rearrange=False)


def test_a_directory_that_cannot_be_written_to_says_how_to_do_without(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    (tmp_path / "kvstored-streaming.lock").mkdir()  # root may write to any directory
    with pytest.raises(StreamingFailed, match=r"rearrange=False\) reads the checkpoint where it lies"):
        opened(tmp_path)
