"""Which models can be served at all, as far as their structure says; and the shape of their KV.

Owns the reasons for refusal. Never trusts a configuration for shapes: it runs the model on two tokens and
looks. What structure cannot show (a prefix that depends on what follows, positions that are not relative to
the prompt) is the self-test's business. Invariant: what passes keeps one K and one V per layer, the same for
all layers, and nothing else; latent attention's latent counts as K and its rope key as V. Layers that see a
window, or a chunk, are served with a cache that keeps every token: their mask hides what lies outside, as it
does when a prompt is computed in one pass.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvclient.errors import InvalidArgument
from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.proof import evaluating
from kvclient.hf.model.watch import foreign_hook
from kvclient.hf.release import cache_of, passing

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
PROBE_TOKENS = 2
WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")


class Refused(InvalidArgument):
    """This model's KV cannot be reused rightly; the text says why."""


@dataclass(frozen=True)
class KVShape:
    layers: int
    heads: int
    head_dim: int  # of K and of V; where they are of different widths, of both together
    dtype: torch.dtype
    key_dim: int = 0  # of K, where V is of another width; 0: it is not


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model under a peft wrapper, or the model itself."""
    if (compiled := getattr(model, "_orig_mod", None)) is not None:
        raise Refused(
            f"torch.compile() put a {type(model).__name__} around this {type(compiled).__name__}: give the "
            "one inside (_orig_mod), and compile it in place, with model.compile(), before or after"
        )
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, GenerationMixin) or not hasattr(type(inner), "_prefill"):
        raise Refused(f"{type(inner).__name__} is no transformers 5 model with generate()")
    return inner


def check_structure(model: torch.nn.Module) -> KVShape:
    """The shape of the model's KV. Raises Refused with the reason."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise Refused(f"{name} is an encoder-decoder: its KV depends on the encoder's input too")
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise Refused(f"{name} has {kind} RoPE: the same token has another K in a longer prompt")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others := sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind):
        raise Refused(
            f"{name} has layers of other kinds ({', '.join(others)}): their state is no KV of single tokens"
        )
    if hook := foreign_hook(model):
        raise Refused(f"{name} has a forward hook, or a module's own forward, of unknown effect: {hook}")
    _check_layers(name, model, config)
    return _probe(name, model, config)


def widest_window(config: Any) -> int:
    """Tokens that the widest windowed or chunked layer sees. 0: every layer sees all."""
    layers = DynamicCache(config=config).layers
    return max(
        (layer.sliding_window for layer in layers if type(layer) is DynamicSlidingWindowLayer), default=0
    )


def _masks_windows(model: torch.nn.Module) -> bool:
    """Whether transformers' own code makes this model's masks, windows included: with a cache that keeps all
    tokens, the mask alone hides what left the window.
    """
    names = {type(module).__module__ for module in model.modules()}
    own = all(name.startswith(("transformers.", "torch.")) for name in names)
    return own and any(hasattr(sys.modules.get(name), mask) for name in names for mask in WINDOW_MASKS)


def _check_layers(name: str, model: torch.nn.Module, config: Any) -> None:
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    kinds -= {DynamicLayer, DynamicSlidingWindowLayer}
    if (window := widest_window(config)) and not _masks_windows(model):
        raise Refused(
            f"{name} has sliding-window layers of {window} tokens, and no mask of transformers for "
            "them: what it sees may hang on what its cache drops"
        )
    if not kinds:
        return
    words = ", ".join(sorted(kind.__name__ for kind in kinds))
    if any("Linear" in kind.__name__ for kind in kinds):
        raise Refused(f"{name} has linear-attention layers ({words}): their state is no KV of single tokens")
    raise Refused(f"{name} keeps more than K and V of each token ({words})")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


@torch.no_grad()
def _probe(name: str, model: torch.nn.Module, config: Any) -> KVShape:
    cache = DynamicCache()  # every layer keeps all tokens, whatever its window
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=model.device)
    forget_pending()  # of a pass that failed in this thread, or of a cache used after detach()
    try:
        with evaluating(model):
            out = model(input_ids=ids, use_cache=True, **passing(cache))
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says nothing about the model
    except Exception as error:  # whatever the model's own code raises
        raise Refused(
            f"{name} does not run on {PROBE_TOKENS} tokens with a DynamicCache: {error!r:.200}"
        ) from error
    if cache_of(out) is not cache or not cache.layers:
        raise Refused(f"{name} does not fill the cache that generate() gives it")
    layers = cache.layers
    if any(layer.keys is None or layer.keys.ndim != 4 for layer in layers):
        raise Refused(f"{name} has layers that fill no K and V of their own")
    shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers}
    dtypes = {t.dtype for layer in layers for t in (layer.keys, layer.values)}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise Refused(
            f"{name} has layers of different shapes or types: {sorted(shapes)}, {sorted(map(str, dtypes))}"
        )
    ((*of_keys, key_dim), (*of_values, value_dim)), dtype = shapes.pop(), dtypes.pop()
    if of_keys != of_values:
        raise Refused(f"{name} has K of {of_keys} and V of {of_values}: [rows, heads, tokens] differ")
    batch, heads, tokens = of_keys
    if (batch, tokens) != (1, PROBE_TOKENS) or dtype not in DTYPE_NAMES:
        raise Refused(f"{name} caches {tokens} tokens of {batch} rows for {PROBE_TOKENS} of 1, as {dtype}")
    if key_dim == value_dim:
        return KVShape(len(layers), heads, key_dim, dtype)
    return KVShape(len(layers), heads, key_dim + value_dim, dtype, key_dim)
