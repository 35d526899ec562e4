"""Proves that the Triton twins mean what the contract says: attention, its splits and merge, and quantising.

Method: in Triton's interpreter on the CPU, in a process of its own (the choice between interpreter and
compiler is made once a process), against the oracle in double and, for codes, byte for byte against the CPU
library; and compiled, without a GPU, for two of them (slow). Skipped where triton is not installed: the extra
`triton`, `make triton`. Bounds, of the largest value: fp32 2e-6 and the rounding of large scores.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvclient import kernels
from kvclient.errors import InvalidArgument
from tests.kernels.compare import assert_bitwise_equal, narrow, widen
from tests.kernels.oracle import Case

ROOT = Path(__file__).resolve().parents[3]
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
SHARED_BYTES = 99 << 10  # of a thread block, compute capability 8.6

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: `make triton`"
)
inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_in_the_interpreter starts")


@pytest.mark.skipif(INSIDE, reason="this is that process")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.skipif(INSIDE, reason="the interpreter compiles nothing")
@pytest.mark.timeout(900)
def test_compiled_for_gpus_that_are_not_here():
    """Into machine code for sm_80 and sm_90, within the shared memory of the smallest of its kind."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kvclient.kernels.triton_builds", "80", "90"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["capability"] for kernel in built} == {80, 90}
    assert {kernel["kernel"] for kernel in built} == {"attend_tile", "merge_tile", "quantise_tile"}
    assert all(kernel["cubin_bytes"] > 1000 and kernel["shared_bytes"] <= SHARED_BYTES for kernel in built)


# ---------------------------------------------------------------- in the interpreter


def agree(case: Case) -> None:
    from kvclient.kernels import triton_calls

    out, lse = np.empty_like(case.q), np.full(case.q.shape[:3], 7, np.float32)
    call = kernels.prepare(
        case.q, case.positions, case.rows, case.head_dim**-0.5, tails=case.tails, out=out, lse=lse,
        rope=case.rope, path="reference", **case.options,
    )  # fmt: skip
    triton_calls.attend(call.args)
    want, want_lse = case.oracle()
    seen = np.isfinite(want_lse)
    largest = np.abs(want_lse[seen]).max(initial=1)
    bound = (ROUNDING[case.dtype] + 4e-7 * largest) * max(1e-30, np.abs(want).max())
    assert np.abs(widen(out) - want).max() <= bound + 1e-30
    assert (np.isneginf(lse) == ~seen).all()
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= 3e-4 * largest


@inside
@pytest.mark.parametrize("codec", ["", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention(codec, tokens, dtype):
    """Blocks of another position, parts of blocks, one-token segments, a tail; rows of different lengths."""
    rope = "interleaved" if tokens == 7 else "half"
    case = Case(2, 4, 64, tokens, dtype, rope, seed=tokens)
    case.row().segment(70, 0, codec, delta=5).segment(1, 70, codec).segment(33, 71, codec, delta=-700)
    case.segment(tokens + 2, 104, tail=True)
    case.row().segment(90, 0, codec, first=33, after=5, group=64).segment(tokens, 90, tail=True)
    agree(case.queries())


@inside
@pytest.mark.parametrize(("heads", "group", "head_dim"), [(1, 1, 18), (2, 3, 96), (1, 16, 128), (1, 5, 256)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shapes(heads, group, head_dim, dtype):
    case = Case(heads, group, head_dim, 2, dtype, seed=head_dim)
    case.row().segment(33, 0, "int8").segment(20, 33).segment(5, 53, tail=True)
    agree(case.queries())


@inside
@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"softcap": 5.0},
        {"causal": False},
        {"sinks": np.float32([0.5, -3, 40, 0.0])},
        {"window": 3, "softcap": 2.0, "sinks": np.float32([1, 2, 3, 4])},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 9])
def test_options(options, tokens):
    case = Case(2, 2, 32, tokens, options=options, seed=3)
    case.row().segment(64, 0, "int8").segment(70, 64, "int4").segment(tokens, 134, tail=True)
    agree(case.queries())


@inside
def test_corners():
    """No tail, no key at all, scales of zero, values at the end of fp16, queries before every key."""
    flat = np.full((1, 40, 32), 3.0)
    case = Case(1, 2, 32, 2, seed=5).row().segment(40, 0, "int8", keys=flat, values=flat)
    agree(case.queries())
    agree(Case(1, 2, 32, 1, seed=5).row().segment(5, 9).queries(np.zeros((1, 1))))
    big = np.where(np.arange(32) % 2, 60000.0, -60000.0) * np.ones((1, 40, 1))
    agree(Case(1, 2, 32, 1, seed=6).row().segment(40, 0, "int8", keys=big).queries(scale=1e-3))
    agree(Case(1, 2, 32, 2, seed=7).row().segment(40, 10).queries(np.array([[5, 9]])))
    no_sink = {"sinks": np.float32([-np.inf, 1.5])}  # rows of one program, one of them without a key
    agree(Case(1, 2, 32, 2, options=no_sink).row().segment(40, 10).queries(np.array([[5, 19]])))


@inside
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_codes_are_those_of_the_cpu_library(bits, group, dtype):
    from kvclient.kernels import codec, triton_calls

    random = np.random.default_rng(bits + group)
    x = random.standard_normal((2, 70, 80)) * 10.0 ** random.integers(-6, 4, (2, 70, 1))
    x[0, 3], x[1, :, 7], x[1, 5], x[1, 6] = 1.5, -2.0, 0.0, -0.0
    x = narrow(x, dtype)
    wanted, found = kernels.quantise(x, bits, group, path="reference"), kernels.empty(2, 70, 80, bits, group)
    triton_calls.quantise(codec._conversion(x, found, "auto"))
    for name in ("codes", "scale", "zero"):
        assert_bitwise_equal(getattr(found, name), getattr(wanted, name))


@inside
def test_what_is_wrong_is_said():
    from kvclient.kernels import codec, contract, triton_calls

    x = np.ones((1, 8, 16), np.float32)
    x[0, 3, 5] = np.inf
    with pytest.raises(kernels.NotQuantisable, match="65504"):
        triton_calls.quantise(codec._conversion(x, kernels.empty(1, 8, 16, 8, 32), "auto"))
    with pytest.raises(InvalidArgument, match="codec 2 under queries of dtype 0"):
        agree(Case(1, 1, 16).row().segment(5, 0, "bfloat16").queries())
    for field, wrong in (("k_group", 48), ("codec", 9), ("v", 0)):
        case = Case(1, 1, 16).row().segment(5, 0, "int8").queries()
        call = kernels.prepare(case.q, case.positions, case.rows, 0.1, out=np.empty_like(case.q))
        segment = contract.Segment.from_address(contract.Sequence.from_address(call.args.sequences).segments)
        setattr(segment, field, wrong)
        with pytest.raises(InvalidArgument, match={"v": "without K or V"}.get(field, f"{field}={wrong}")):
            triton_calls.attend(call.args)


@inside
def test_a_model_under_the_backend():
    from kvclient.hf import attention
    from kvclient.hf.attention import backends, registered
    from kvclient.hf.attention import torch_reference as in_torch
    from tests.hf.zoo import build, near, prompt

    assert attention.available_backends()["triton"] is None
    import torch

    model, ids = build("gemma"), prompt(12)
    with torch.no_grad():
        plain = model(ids).logits
        assert attention.install(model, "triton") == "triton"
        before = attention.fallbacks()
        assert near(model(ids).logits, plain)
        query, key, value = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
        columns = torch.tensor([1, 4, 5])
        seen = torch.arange(9)[None] <= columns[:, None]
        mask = registered.at(columns, 9, query.dtype)
        backend = backends.backend("triton")
        found, _ = registered.attention(backend, model.model.layers[0].self_attn, query, key, value, mask)
        assert near(found, in_torch.attend(query, key, value, seen[None, None], 0.25))
        assert attention.fallbacks() == before


@inside
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "gpt_oss"])
def test_other_models_under_the_backend(name):
    """Partial rotation, softcap, sinks and windows; what is padded; a step of one token."""
    import torch

    from kvclient.hf import attention
    from tests.hf.zoo import generate, known, near, prompt

    model, rows = known(name), torch.cat([prompt(21), prompt(21, seed=2)])
    mask = torch.ones_like(rows)
    rows[1, :9] = mask[1, :9] = 0
    plain, logits, _ = generate(model, rows, 2, attention_mask=mask)
    attention.install(model, "triton")
    before = attention.fallbacks()
    tokens, found, _ = generate(model, rows, 2, attention_mask=mask)
    assert torch.equal(tokens, plain) and near(found, logits)
    assert attention.fallbacks() == before
