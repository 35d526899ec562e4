"""Which models can be served at all, as far as their structure says; and the shape of their KV.

Owns the reasons for refusal. Never trusts a configuration for shapes: it runs the model on two tokens and
looks. What structure cannot show (a prefix that depends on what follows, positions that are not relative to
the prompt) is the self-test's business. Invariant: what passes keeps per layer one K and one V, or a state of
all tokens so far, or both, and maybe the keys of an indexer, and nothing else; latent attention's latent
counts as K and its rope key as V.
Layers that see a window, or a chunk, are served with a cache that has a column for every token: their mask
hides what lies outside, as it does when a prompt is computed in one pass.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvclient.errors import InvalidArgument
from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.attention.proof import MOST_TOKENS, evaluating
from kvclient.hf.model.beside import compressed_in, indexers_in, positions_in
from kvclient.hf.model.groups import LayerGroup, sees_only_windows, windows_of
from kvclient.hf.model.own_caches import empty_cache, keeps_states
from kvclient.hf.model.states import StateTensor, goes_on, states_in
from kvclient.hf.model.watch import foreign_hook
from kvclient.hf.release import DUMMIES, INDEXED, STATES, cache_of, compresses, passing

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
PROBE_TOKENS = 2
LEAST_WINDOW = MOST_TOKENS + 1  # of a model that is served within it only: the self-test passes narrower ones
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
    main: tuple[int, ...] | None = None  # layers of this shape that need all tokens; None: all layers
    groups: tuple[LayerGroup, ...] = ()  # the others that keep K and V
    states: tuple[StateTensor, ...] = ()
    stepwise: bool = False  # behind a state the model takes one token at a time only
    most_tokens: int = 0  # of a call; 0: any
    positions: tuple[int, int] = (0, 0)  # kinds that are kept beside an indexer's keys, and in which layer
    rates: tuple[tuple[int, int], ...] = ()  # layers that compress tokens, and how many to an entry

    @property
    def latent(self) -> bool:
        """Whether some layer's K and V are of different widths."""
        main = self.main is None or (bool(self.main) and self.main[0] < self.layers)
        real = [group for group in self.groups if group.layers[0] < self.layers]
        return (main and bool(self.key_dim)) or any(group.key_dim for group in real)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The different (heads, head_dim) of layers that keep K and V, that of the most layers that need all
        tokens first."""
        parts = [(self.main, self.heads, self.head_dim)] if self.main != () else []
        parts += [(group.layers, group.heads, group.head_dim) for group in self.groups]
        real = [size for layers, *size in parts if layers is None or layers[0] < self.layers]
        return list(dict.fromkeys((heads, head_dim) for heads, head_dim in real))

    @property
    def shares(self) -> bool:
        """Whether some layer keeps nothing of its own."""
        kept = set(self.main if self.main is not None else range(self.layers))
        kept.update(layer for group in self.groups for layer in group.layers)
        kept.update(state.layer for state in self.states)
        return not kept.issuperset(range(self.layers))

    @property
    def beside(self) -> bool:
        """Whether some layer keeps more of tokens than K and V: the keys of an indexer, or entries."""
        parts = (self.main or (), *(group.layers for group in self.groups))
        return any(layer >= self.layers for part in parts for layer in part)

    @property
    def stride(self) -> int:
        """A hit ends behind a multiple of so many tokens only."""
        return math.lcm(*(rate for _, rate in self.rates))

    @property
    def plain(self) -> bool:
        """Whether each layer keeps K and V of every token, all of one shape."""
        return self.main is None and not self.states


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model under a peft wrapper, or the model itself. Raises Refused for what has no
    generate() of transformers 5, and around torch.compile().
    """
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
    if hook := foreign_hook(model):
        raise Refused(f"{name} has a forward hook, or a module's own forward, of unknown effect: {hook}")
    most = _check_layers(name, model, config)
    return dataclasses.replace(_probe(name, model, config, bool(most)), most_tokens=most)


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
    known = all(name.startswith(("transformers.", "torch.")) for name in names)
    return known and any(hasattr(sys.modules.get(name), mask) for name in names for mask in WINDOW_MASKS)


def _check_layers(name: str, model: torch.nn.Module, config: Any) -> int:
    """How long a call can be at most; 0: any. Raises Refused."""
    most = 0
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except (KeyError, AttributeError, TypeError) as error:
        raise Refused(f"{name} has layers that transformers has no cache for ({error!r:.100})") from error
    if (window := widest_window(config)) and not _masks_windows(model):
        most = min(window for window, _ in windows_of(config) if window)  # within it, it sees all
        if most < LEAST_WINDOW:
            raise Refused(
                f"{name} has sliding-window layers of {window} tokens, and no mask of transformers for "
                "them: what it sees may hang on what its cache drops"
            )
    kinds = {kind for kind in kinds if not compresses(kind)}
    if foreign := kinds - {DynamicLayer, DynamicSlidingWindowLayer, *STATES, *DUMMIES, *INDEXED}:
        words = ", ".join(sorted(kind.__name__ for kind in foreign))
        raise Refused(f"{name} keeps more than K and V of each token, or a state ({words})")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    others = [kind for kind in others if "linear" in kind or "attention" not in kind]
    if others and not STATES:
        raise Refused(f"{name} has layers ({', '.join(others)}) with states that it keeps elsewhere")
    return most


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


@torch.no_grad()
def _probe(name: str, model: torch.nn.Module, config: Any, whole: bool) -> KVShape:
    """whole: layers with windows are stored as if they had none."""
    layers = empty_cache(model).layers
    special = any(isinstance(layer, (*STATES, *DUMMIES, *INDEXED)) or compresses(layer) for layer in layers)
    cache = empty_cache(model) if special else DynamicCache()  # every layer keeps all tokens
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=model.device)
    forget_pending()  # of a pass that failed in this thread, or of a cache used after detach()
    try:
        with evaluating(model):
            out = model(input_ids=ids, use_cache=True, **passing(cache, model))
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says nothing about the model
    except Exception as error:  # whatever the model's own code raises
        raise Refused(
            f"{name} does not run on {PROBE_TOKENS} tokens with a DynamicCache: {error!r:.200}"
        ) from error
    filled = cache if keeps_states(model) else cache_of(out, model)
    if filled is not cache or not cache.layers:
        raise Refused(f"{name} does not fill the cache that generate() gives it")
    states = states_in(cache)
    kept = {}
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None and layer.keys.ndim == 4:
            kept[index] = layer
        elif not isinstance(layer, DUMMIES) and index not in {state.layer for state in states}:
            raise Refused(f"{name} has layers that fill no K and V of their own, and no state")
    windows, beside = dict(enumerate(windows_of(config))), indexers_in(cache)
    rates, entries, near = compressed_in(model)
    found = _groups(name, kept, {} if whole or len(windows) != len(cache.layers) else windows)
    dtype = _one_dtype(name, {**kept, **beside, **entries})
    if any(group.window for group in found) and not sees_only_windows(model, found, dtype):
        found = _groups(name, kept, {})  # stored whole
    shortened = {number: _first(layer) for number, layer in entries.items()}
    found += _groups(name, {**beside, **shortened}, near)
    stride = math.lcm(*rates.values())
    found = [dataclasses.replace(group, stride=stride) for group in found]
    shape = _shape(len(cache.layers), found, dtype, states)
    shape = dataclasses.replace(shape, rates=tuple(rates.items()), positions=positions_in(cache))
    if not states:
        return shape
    if not goes_on(model, 1):
        raise Refused(f"{name} does not go on rightly behind the state that its cache holds")
    return dataclasses.replace(shape, stepwise=not goes_on(model))


def _first(layer: Any) -> DynamicLayer:
    """As if it had PROBE_TOKENS."""
    shown = DynamicLayer()
    shown.keys, shown.values = layer.keys[:, :, :PROBE_TOKENS], layer.values[:, :, :PROBE_TOKENS]
    return shown


def _one_dtype(name: str, kept: dict[int, Any]) -> torch.dtype:
    dtypes = {t.dtype for layer in kept.values() for t in (layer.keys, layer.values)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPE_NAMES):
        raise Refused(f"{name} has K and V of types {sorted(map(str, dtypes))}")
    return dtypes.pop() if dtypes else torch.float32


def _groups(name: str, kept: dict[int, Any], windows: dict[int, tuple[int, bool]]) -> list[LayerGroup]:
    """Layers of one shape and one need, in order of their first."""
    alike: dict[Any, list[int]] = {}
    for index, layer in kept.items():
        (*of_keys, key_dim), (*of_values, value_dim) = layer.keys.shape, layer.values.shape
        if of_keys != of_values or (of_keys[0], of_keys[2]) != (1, PROBE_TOKENS):
            raise Refused(f"{name} caches K of {of_keys} and V of {of_values} for 1 row of {PROBE_TOKENS}")
        width = (key_dim, 0) if key_dim == value_dim else (key_dim + value_dim, key_dim)
        alike.setdefault((of_keys[1], *width, *windows.get(index, (0, False))), []).append(index)
    return [LayerGroup(tuple(layers), *shape) for shape, layers in alike.items()]


def _shape(
    layers: int, found: list[LayerGroup], dtype: torch.dtype, states: tuple[StateTensor, ...]
) -> KVShape:
    whole = max((group for group in found if not group.window), key=lambda g: len(g.layers), default=None)
    if whole is None:
        return KVShape(layers, 1, 1, dtype, 1, (), tuple(found), states)
    shape = (whole.heads, whole.head_dim, dtype, whole.key_dim)
    if len(found) == 1 and not states and len(whole.layers) == layers:
        return KVShape(layers, *shape)
    return KVShape(layers, *shape, whole.layers, tuple(g for g in found if g is not whole), states)
