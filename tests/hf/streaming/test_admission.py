"""Proves that what is said of a request's memory is no less than what it takes.

Method: a process of its own generates with each model of a matrix (plain, packed, streamed; fp32 and bf16;
short and long prompts; one and several rows) and reads its peak of memory from the kernel, which forgets
it before each call (/proc/self/clear_refs); then the arithmetic of what fits.
"""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, streaming_stats
from kvclient.hf.streaming.planner.admission import Admission, RequestTooLarge
from kvclient.hf.streaming.registry import streams_of

MEASURE = """
import ctypes, json, pathlib, sys, tempfile
import torch, transformers
from kvclient.hf import awq
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.planner.admission import Admission
from tests.hf.awq_checkpoint import write_checkpoint

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def taken(run):
    ctypes.CDLL(None).malloc_trim(0)  # what calls before have left
    open("/proc/self/clear_refs", "w").write("5")  # the peak is from now on
    before = status("VmRSS")
    run()
    return status("VmHWM") - before

def models():
    for kind, vocab in (("plain", 49152), ("awq", 49152), ("streamed", 2048)):
        for dtype in (torch.float32, torch.bfloat16):
            config = transformers.LlamaConfig(
                vocab_size=vocab, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
                num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=16384,
            )
            model = transformers.LlamaForCausalLM(config).to(dtype).eval()
            home = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1]))
            if kind == "plain":
                yield kind, model
                model.set_attn_implementation("eager")
                yield "eager", model
                continue
            write_checkpoint(home, model, 64)
            del model
            if kind == "awq":
                yield kind, awq.from_pretrained(home)
            else:
                yield kind, StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))

for kind, model in models():
    for prompt, rows in ((16, 1), (700, 1), (2500, 1), (300, 3)):
        if kind == "eager" and prompt == 2500:
            continue
        for chunk in (64, 512):
            admission = Admission(model, memory=1 << 40, chunk=chunk)
            ids = torch.randint(1, 2000, (rows, prompt))
            options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
            own = taken(lambda: model.generate(ids, prefill_chunk_size=chunk, **options))
            said = admission.estimate(prompt, 3, rows).working
            print(json.dumps([kind, str(model.dtype), prompt, rows, chunk, own, said]), flush=True)
"""


@pytest.mark.slow
def test_no_call_takes_more_than_was_said(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * (4 + 3 + 4 + 4) * 2
    assert not [row for row in rows if row[5] > row[6]]
    print(sorted((round(row[6] / max(row[5], 1 << 20), 2), row) for row in rows)[:: len(rows) - 1])


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_what_is_too_large_is_refused_with_the_numbers_or_cut(model):
    least = Admission(model, memory=1 << 40).estimate(100, 20)
    admission = Admission(model, memory=least.bytes)
    ids = torch.arange(200)[None]
    assert torch.equal(admission.admit(ids[:, :100], 20), ids[:, :100])
    words = r"200 tokens and 20 new .* the longest prompt that fits has 100"
    with pytest.raises(RequestTooLarge, match=words) as told:
        admission.admit(ids, 20)
    assert told.value.longest == 100 and told.value.estimate.bytes > admission.memory
    assert torch.equal(admission.admit(ids, 20, auto_truncate=True), ids[:, 100:])
    assert admission.longest(20) == 100 and admission.longest(20, rows=2) < 60
    with pytest.raises(RequestTooLarge, match="that fits has 0"):
        Admission(model, memory=1000).admit(ids, 20, auto_truncate=True)
    with pytest.raises(InvalidArgument, match="chunk=0"):
        Admission(model, chunk=0)


def test_it_grows_with_everything_that_is_asked(model):
    admission = Admission(model, memory=1 << 40)
    needed = admission.estimate(100, 20).bytes
    assert admission.estimate(101, 20).bytes > needed
    assert admission.estimate(100, 21).bytes > needed
    assert admission.estimate(100, 20, rows=2).bytes > needed
    assert Admission(model, memory=1 << 40, chunk=50).estimate(100, 20).bytes < needed


def test_a_call_that_took_more_raises_all_that_follow(model):
    admission = Admission(model, memory=1 << 40)
    before = admission.estimate(100, 20)
    admission.measured(before, before.working // 2)
    assert admission.estimate(100, 20) == before
    admission.measured(before, 2 * before.working)
    assert admission.estimate(100, 20).working >= 2 * before.working - 8
    fresh = Admission(model, memory=1 << 40).estimate(50, 20)
    assert admission.estimate(50, 20).working >= 2 * fresh.working - 8


@pytest.mark.parametrize("rearrange", [True, False])
@pytest.mark.parametrize("stored, computed", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_weights_in_another_type_are_planned_as_what_they_become(
    model, tmp_path, stored, computed, rearrange
):
    """The plan said the bytes on the disk: half of what fp32 takes that was stored as bf16."""
    copy.deepcopy(model).to(getattr(torch, stored)).save_pretrained(tmp_path)
    config = StreamingConfig(residency="full_resident", rearrange=rearrange)
    held = StreamingCausalLM.from_pretrained(tmp_path, config, dtype=getattr(torch, computed))
    said = streaming_stats(held)["bytes_held"]
    parts = [sum(t.nbytes for t in layer.parameters()) for layer in held.model.layers]
    assert said >= sum(tensor.nbytes for tensor in held.parameters())
    streamed = StreamingConfig(residency="full_stream", rearrange=rearrange)
    other = StreamingCausalLM.from_pretrained(tmp_path, streamed, dtype=getattr(torch, computed))
    stats = streaming_stats(other)
    outside = sum(t.nbytes for name, t in held.named_parameters() if ".layers." not in name)
    slots = 2 * stats["bytes_per_pass"] // len(parts)
    assert stats["bytes_held"] >= outside + slots + max(parts)  # the copies beside what was read
    streams_of(other).close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_residency_type_or_codec_takes_more_than_was_said(tmp_path):
    """Weights, slots and the call, by every way of the matrix; 0 bytes over the plan. It takes 13 minutes,
    11 of processor; beside other work up to four times that.
    """
    command = [sys.executable, "-m", "tests.hf.streaming.planner_matrix", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 270
    assert not [row for row in rows if row["taken"] > row["said"]]
    print(min(rows, key=lambda row: row["ratio"]))


@pytest.mark.parametrize("rearrange", [True, False])
def test_copies_of_all_layers_lie_at_the_same_place(model, tmp_path, rearrange):
    """malloc left holes between layers' copies: a call took up to 1.3 times what was said."""
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path)
    held, other = (
        StreamingCausalLM.from_pretrained(
            tmp_path, StreamingConfig(residency=residency, rearrange=rearrange), dtype=torch.float32
        )
        for residency in ("full_resident", "full_stream")
    )
    lie, taken = [], []

    def look(layer, _args, _out):
        weights = [weight for weight in layer.parameters() if weight.dim() == 2]
        lie.append(tuple(weight.data_ptr() for weight in weights))
        taken.extend(torch.empty_like(weight) for weight in weights)  # the holes that a layer would leave

    for layer in other.model.layers:
        layer.register_forward_hook(look, prepend=True)
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        said = [other(ids).logits for _ in range(2)]
        want = held(ids).logits
    assert len(lie) == 4 and len(set(lie)) == 1
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], want)
    streams_of(other).close()
