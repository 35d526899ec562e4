"""Proof, before a model has the kernels, that they give it the attention that it had.

Owns the comparison of one forward of a few tokens, the tokens and the tolerances. Never touches the random
number generators or the model's state, and never refuses a model that does not take tokens alone: of that one
nothing is known. Invariant: a window counts whatever its size: the mask the model asks for says it, and the
call of attention must say the same.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.attention.registered import trying

# Largest difference of two logits over their largest magnitude: rounding of another order of summation, not
# more.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
TOKENS, MOST_TOKENS = 40, 160  # a window below the second is passed, and seen in the logits too
_same: set[str] = set()


def prove(model: torch.nn.Module, installed: Callable[[], Any], name: str) -> None:
    """Raises InvalidArgument, with the reason, if the model answers otherwise than within own()."""
    if model.device.type == "meta":
        return
    facts = repr((type(model), str(model.config), str(model.device), str(model.dtype), name))
    key = hashlib.sha256(facts.encode()).hexdigest()
    if key in _same:
        return
    with evaluating(model), torch.no_grad(), trying():
        try:
            inputs = _given(model)
            with installed():
                wanted = model(**inputs)[0]
        except Exception:  # it takes more than tokens, or other ones
            return
        if not isinstance(wanted, torch.Tensor) or not bool(torch.isfinite(wanted).all()):
            return
        try:
            found = model(**inputs)[0]
            with trying(windows=True):
                model(**inputs)
        except Exception as error:
            raise InvalidArgument(f"{type(model).__name__} cannot have the kernels: {error}") from error
    apart = _apart(found, wanted)
    if not apart <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
        raise InvalidArgument(
            f"{type(model).__name__} cannot have the kernels: their attention is not its own: "
            f"logits differ by {apart:.2g}"
        )
    _same.add(key)


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest magnitude. In 16 bits that of the median token: rounding alone
    may send single tokens to another expert.
    """
    tokens_apart = (found.float() - wanted.float()).abs().amax(-1)
    most = tokens_apart.max() if wanted.dtype == torch.float32 else tokens_apart.median()
    return float(most) / (float(wanted.abs().max()) or 1.0)


def tokens(model: torch.nn.Module, count: int, seed: int) -> torch.Tensor:
    """Fixed tokens [1, count] from the middle of the vocabulary, without the random number generators."""
    size = model.config.get_text_config(decoder=True).vocab_size
    low = min(16, size // 4)
    ids, state = [], seed * 2654435761 % (1 << 32)
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        ids.append(low + (state >> 8) % (size - low))
    return torch.tensor(ids, dtype=torch.int64, device=model.device)


def _given(model: torch.nn.Module) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    count = window + 8 if isinstance(window, int) and TOKENS - 8 < window < MOST_TOKENS else TOKENS
    longest = getattr(config, "max_position_embeddings", None)
    ids = tokens(model, min(count, longest) if isinstance(longest, int) else count, 1)[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the model is in evaluation mode; then each of its modules in the one it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
