"""Proof, before a model has the kernels, that they give it the attention that it had.

Owns the comparison of one forward of a few tokens, the tokens and the tolerances. Never touches the random
number generators or the model's state, and never refuses a model that does not take tokens alone: of that one
nothing is known. Invariant: a window counts whatever its size: the mask the model asks for says it, and the
call of attention must say the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvclient.errors import InvalidArgument

# Largest difference of two logits over their largest magnitude: rounding of another order of summation, not
# more.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
TOKENS, MOST_TOKENS = 40, 160  # a window below the second is passed, and seen in the logits too
WINDOW = "_kvclient_window"  # of a mask that was made in windows(): the window it was asked for with
# What changes scores or which keys count, under names that neither the kernels nor torch's way here reads.
UNREAD = ("sinks", "indices", "block_indices", "block_mask", "head_mask")

_state = threading.local()
_same: set[str] = set()


def under_way() -> bool:
    """Whether this thread tries a model: nothing is counted then."""
    return getattr(_state, "trial", False)


def wants_windows() -> bool:
    """Whether masks are to be made, with their WINDOW, instead of being left to the attention."""
    return getattr(_state, "windows", False)


@contextlib.contextmanager
def _set(**what: bool) -> Iterator[None]:
    before = dict(_state.__dict__)
    _state.__dict__.update(what)
    try:
        yield
    finally:
        _state.__dict__.clear()
        _state.__dict__.update(before)


def check_call(attention_mask: torch.Tensor | None, window: int, kwargs: dict[str, Any]) -> None:
    """Raises InvalidArgument if this call of attention means what no argument known here says."""
    if unread := [name for name in UNREAD if kwargs.get(name) is not None]:
        raise InvalidArgument(f"the model gives its attention {unread[0]}, which is not read here")
    asked = getattr(attention_mask, WINDOW, window)
    if asked != window:
        raise InvalidArgument(
            f"the model's mask has a window of {asked} (0: none), its call of attention one of {window}"
        )


def prove(model: torch.nn.Module, installed: Callable[[], Any], name: str) -> None:
    """Raises InvalidArgument, with the reason, if the model answers otherwise than within own()."""
    if model.device.type == "meta":
        return
    facts = repr((type(model), str(model.config), str(model.device), str(model.dtype), name))
    key = hashlib.sha256(facts.encode()).hexdigest()
    if key in _same:
        return
    with evaluating(model), torch.no_grad(), _set(trial=True):
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
            with _set(windows=True):
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
    """Fixed tokens from the middle of the vocabulary, without the random number generators."""
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
