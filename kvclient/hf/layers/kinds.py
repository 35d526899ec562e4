"""Which classes of transformers compute a norm, an attention or a decoder layer as the forwards here do.

Owns what their code looks like: the names it uses, in their order, and its constants, as numbers alone would
not tell what only some calls need, or what is read later. Never runs it. Invariant: code of any other look
is nobody's.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from kvclient.hf.release import CACHE, NAMES

_HEADS = ("shape", "head_dim")
_PARTS = ("q_proj", "view", "transpose", "k_proj", "v_proj")
_NORMED = ("q_norm", "q_proj", "view", "transpose", "k_norm", "k_proj", "v_proj")
_TURN = ("apply_rotary_pos_emb",)
_ATTEND = (
    "update", "layer_idx", "ALL_ATTENTION_FUNCTIONS", "get_interface", "config", "_attn_implementation",
    "eager_attention_forward", "training", "attention_dropout", "scaling",
)  # fmt: skip
_OUT = ("reshape", "contiguous", "o_proj")
_PLAIN, _WINDOW = ("dropout", "scaling"), ("dropout", "scaling", "sliding_window")
_WANTED = (
    "hidden_states", "attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings",
)  # fmt: skip

NORM = ("dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight")
NORM_NUMBERS = (2, -1, True, ("keepdim",))
LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SCALED_LAYER = ("input_layernorm", "self_attn", "residual_multiplier", "post_attention_layernorm", "mlp")
LAYER_PARTS = set(LAYER)
# A model's body without its head: embedding, mask, angles, layers one behind the other, norm.
_BODY = (
    "ValueError", "embed_tokens", "DynamicCache", "config", "get_seq_length", "torch", "arange", "shape",
    "device", "unsqueeze",
)  # fmt: skip
_END = ("layers", "num_hidden_layers", "norm", "BaseModelOutputWithPast")
_BODY_TOLD = (
    ("config",), 0, 1, ("device",), ("config", "inputs_embeds", "attention_mask", CACHE, "position_ids"),
)  # fmt: skip
_LAYER_TOLD = ("attention_mask", "position_embeddings", "position_ids", CACHE, "use_cache")
_END_TOLD = ("last_hidden_state", CACHE)
# By the names it uses and its constants, who says that a body's layers have windows.
_BODIES = {
    ((*_BODY, "create_causal_mask", "rotary_emb", *_END),
     (*_BODY_TOLD, ("position_ids",), _LAYER_TOLD, _END_TOLD)): "",  # Llama
    ((*_BODY, "isinstance", "dict", "create_causal_mask", "has_sliding_layers",
      "create_sliding_window_causal_mask", "rotary_emb", "enumerate", *_END[:2], "layer_types", *_END[2:]),
     (*_BODY_TOLD, "full_attention", "sliding_attention", _LAYER_TOLD, _END_TOLD, ())): "layer_types",  # Qwen
    ((*_BODY, "sliding_window", "create_causal_mask", "create_sliding_window_causal_mask", "rotary_emb",
      *_END),
     (*_BODY_TOLD, ("position_ids",), (_LAYER_TOLD[0], *_LAYER_TOLD[2:], _LAYER_TOLD[1]), _END_TOLD)):
        "sliding_window",  # Mistral
}  # fmt: skip
# Whose wrappers of a model's forward take defaults from its configuration and record what layers answer.
_MODEL_WRAPPERS = {"transformers.utils.generic", "transformers.utils.output_capturing"}
# Whose wrappers of a forward are for training alone, and for names of arguments that these are not called by.
WRAPPERS = {"transformers.modeling_layers", "transformers.utils.deprecation"}
OLD_NAMES = frozenset(NAMES) - {CACHE}


class Attention(NamedTuple):
    """How an attention differs from Llama's: norms of heads' queries and keys, a switch of its rope, who has
    its window (nobody, itself or its configuration), and whether a cache is told what the attention is.
    """

    norms: bool = False
    switched: bool = False
    window: str = ""
    tells: bool = False


_ATTENTIONS = {
    ((*_HEADS, *_PARTS, *_TURN, *_ATTEND, *_OUT), _PLAIN): Attention(),  # Llama, Granite
    ((*_HEADS, *_PARTS, *_TURN, *_ATTEND, "sliding_window", *_OUT), _WINDOW): Attention(window="itself"),
    ((*_HEADS, *_PARTS, *_TURN, *_ATTEND, "getattr", *_OUT), _WINDOW): Attention(window="configuration"),
    ((*_HEADS, *_NORMED, *_TURN, *_ATTEND, "sliding_window", *_OUT), _WINDOW):
        Attention(norms=True, window="itself"),
    ((*_HEADS, *_PARTS, "use_rope", *_TURN, *_ATTEND, "sliding_window", *_OUT), _WINDOW):
        Attention(switched=True, window="itself"),
}  # fmt: skip
_NUMBERS = {
    "": (-1, 1, 2, 0.0, _PLAIN),
    "itself": (-1, 1, 2, 0.0, _WINDOW),
    "configuration": (-1, 1, 2, 0.0, "sliding_window", _WINDOW),
}
_TOLD = ("kwargs",)  # behind the first three, since transformers 5.24


def norm(module: Any) -> bool:
    """Whether nothing but its weight and its epsilon says what it computes."""
    code = _code(type(module).forward)
    return code is not None and code.co_names == NORM and _constants(code) == NORM_NUMBERS


def attention(module: Any) -> Attention | None:
    """Of a module, how its class attends; None: in a way that is not known."""
    code = _code(plain(type(module).forward))
    if code is None:
        return None
    constants = _constants(code)
    kind = _ATTENTIONS.get((code.co_names, constants[-1])) if constants else None
    wanted = ("self", "hidden_states", "position_embeddings", "attention_mask", CACHE, "kwargs")
    if kind is None or code.co_varnames[: code.co_argcount + 1] != wanted:
        return None
    kind = kind._replace(tells=_TOLD in constants)
    numbers = _NUMBERS[kind.window]
    return kind if constants == (*numbers[:3], *([_TOLD] if kind.tells else []), *numbers[3:]) else None


def layer(module: Any) -> bool:
    """Whether its class is two residual blocks, of attention and of an MLP, each behind its norm."""
    code = _code(plain(type(module).forward))
    if code is None or code.co_names not in (LAYER, SCALED_LAYER):
        return False
    told = code.co_varnames[: code.co_argcount + 1] == ("self", *_WANTED, "kwargs")
    return told and _constants(code) == (_WANTED, ())


def model(module: Any) -> str | None:
    """Of a model's body of Llama's kind, the name in its configuration by which layers have windows; empty:
    none has any. None: its class is none of these.
    """
    code = _code(plain(type(module).forward, _MODEL_WRAPPERS))
    return None if code is None else _BODIES.get((code.co_names, _constants(code)[1:]))


def plain(forward: Any, wrappers: Set[str] = WRAPPERS) -> Any:
    """A class's forward within its known wrappers; one in a wrapper of somebody else is that wrapper."""
    while hasattr(forward, "__wrapped__") and forward.__globals__["__name__"] in wrappers:
        forward = forward.__wrapped__
    return forward


def scaled(module: Any) -> bool:
    """Of a known layer: whether its blocks are multiplied by a number of its own before they are added."""
    code = _code(plain(type(module).forward))
    return code is not None and code.co_names == SCALED_LAYER


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _constants(code: Any) -> tuple[Any, ...]:
    """Without a docstring, or the None in its place."""
    constants: tuple[Any, ...] = code.co_consts
    return constants[1:] if constants and isinstance(constants[0], (str, type(None))) else constants
