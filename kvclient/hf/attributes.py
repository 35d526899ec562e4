"""What a model computes with besides its tables of weights and buffers: plain numbers and tensors among its
modules' attributes, the code of its classes, and what its configuration says.

Owns which of these count, and what was seen of them. Never reads a weight. Invariant: what a forward pass
itself changes is its own state, as a counter is, and counts for nothing. Left out as well: names that begin
with an underscore, and the attributes of the model itself, whose body is what fills the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from kvclient.blocks.identity import CONFIG_DENY_LIST

PLAIN = (bool, int, float, type(None))
HARMLESS = ("training", "gradient_checkpointing")  # the one is asked for by itself, the other needs it


class Attributes:
    """Of the modules that the model has now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._text = model, model.config.get_text_config(decoder=True)
        self._modules = list(model.modules())
        self._classes = list({type(module): None for module in self._modules})
        self._entries = [
            (name, module.__dict__, key)
            for name, module in model.named_modules()
            for key, value in module.__dict__.items()
            if name and not key.startswith("_") and key not in HARMLESS
            if type(value) in PLAIN or isinstance(value, torch.Tensor)
        ]
        self._kept = [held[key] for _, held, key in self._entries]  # or another could get the id of one
        self._first = self._values()

    def settle(self) -> None:
        """The model has run since, as it was: what is different by now is left out."""
        same = [now == first for now, first in zip(self._values(), self._first, strict=True)]
        self._entries = [entry for entry, stays in zip(self._entries, same, strict=True) if stays]

    def look(self) -> list[Any]:
        """Equal to an earlier one if nothing has changed since."""
        parts = {id(config): config for config in (self._model.config, self._text)}
        return [
            self._values(),
            [type(module) for module in self._modules],
            [getattr(kind, "forward", None) for kind in self._classes],
            [_config_state(part) for part in parts.values()],
        ]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        held = [(f"{name}.{key}", own.get(key)) for name, own, key in self._entries]
        return [(name, value) for name, value in held if isinstance(value, torch.Tensor)]

    def numbers(self) -> dict[str, Any]:
        held = {f"{name}.{key}": own.get(key) for name, own, key in self._entries}
        return {name: value for name, value in held.items() if type(value) in PLAIN}

    def code(self) -> list[list[Any]]:
        """Which classes the modules are of, and where their forward passes were written."""
        kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in self._modules]
        return [kinds, [_origins(getattr(kind, "forward", None)) for kind in self._classes]]

    def _values(self) -> list[Any]:
        return [
            value if type(value := held.get(key, held)) in PLAIN else _seen(value)
            for _, held, key in self._entries
        ]


def _seen(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return (id(value),)
    return id(value), value.data_ptr(), None if value.is_inference() else value._version


def _config_state(config: Any) -> str:
    """What the passes of some models read while they run, without parts that are configurations."""
    return repr([
        (key, value)
        for key, value in config.__dict__.items()
        if key not in CONFIG_DENY_LIST and not key.startswith("_") and not hasattr(value, "to_dict")
    ])  # fmt: skip


def _origins(function: Any) -> list[str]:
    """Of a function, and of those that it was wrapped around."""
    out = []
    while (code := getattr(function, "__code__", None)) is not None:
        out.append(f"{function.__globals__.get('__name__')}.{code.co_qualname}")
        function = getattr(function, "__wrapped__", None)
    return out
