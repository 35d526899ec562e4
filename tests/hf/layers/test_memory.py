"""Proves that what the layers of a long prompt hand on is not memory of torch's allocator, and is otherwise
what that makes.

Method: torch's profiler, which tells what its allocator was asked for, around a tiny model's pass.
"""

import pytest
import torch

from kvclient.hf import layers
from kvclient.hf.attention import dense
from tests.hf.layers.test_decoder import SIZES
from tests.hf.zoo import known, near, prompt


def test_what_layers_hand_on_of_long_prompts_is_not_of_torchs_allocator():
    """Where that had a tensor, glibc has no room for one of the same size: a prompt's every layer took memory
    of its own."""
    model, ids = known("llama", **{**SIZES, "layers": 6, "hidden_size": 512}), prompt(300)
    with torch.no_grad():
        plain = model(ids).logits
        layers.install(model)
        model(ids)
        with torch.autograd.profiler.profile(profile_memory=True) as seen:
            found = model(ids).logits
    assert near(found, plain, 1e-3)
    taken = [event.self_cpu_memory_usage for event in seen.function_events]
    large = [size for size in taken if size >= dense.LARGE]
    assert max(taken) > 0 and len(large) < 6, f"one for each layer, or more: {large}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (1, 700, 96), (0, 4), (1, 70_000)])
def test_a_fresh_tensor_is_one_of_new_empty(dtype, shape):
    like = torch.empty(2, dtype=dtype)
    made, wanted = dense.empty(like, shape), like.new_empty(shape)
    assert (made.shape, made.dtype, made.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    assert made.data_ptr() % dense.ALIGN == 0 and made.is_contiguous()
    made[:] = 3
    assert bool((made.clone() == 3).all())
