"""The dimensions of the reuse identity (docs/design.md §8), read from a live model.

Owns what is read and how it is digested; the list and its encoding are kvclient.blocks.identity's. Never
trusts a file name for weights: it digests the tensors as they lie in memory. Invariant: a model that was
merged, pruned, re-scaled or given an adapter after loading has another identity.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvclient.blocks.identity import DIGEST_BYTES, Dimensions, encode
from kvclient.errors import InvalidArgument
from kvclient.hf.awq.linear import as_they_lie
from kvclient.hf.awq.packing import from_panels
from kvclient.hf.model.around import adapter_parameters, adapter_state, adapters
from kvclient.hf.model.values import plain_text
from kvclient.hf.model.watch import Attributes, matmul_precision
from kvclient.hf.streaming.registry import streams_of

HASH_THREADS = 4  # SHA-256 runs without the GIL at 1.3 GB/s a core; memory does not feed many more


def read_dimensions(
    model: torch.nn.Module, attributes: Attributes, layout: bytes, kv_shape: tuple[int, int], kv_dtype: str,
    salt: bytes, weights_digest: bytes | None = None, codec: Mapping[str, Any] | None = None,
) -> Dimensions:  # fmt: skip
    """`kv_shape`: layers and KV heads. Raises InvalidArgument if something has no canonical form."""
    if weights_digest is not None and (
        not isinstance(weights_digest, bytes) or len(weights_digest) != DIGEST_BYTES
    ):
        raise InvalidArgument(f"weights_digest={weights_digest!r:.80}; it must be {DIGEST_BYTES} bytes")
    config = model.config
    quantiser = getattr(model, "hf_quantizer", None)
    return Dimensions(
        weights_digest=weights_digest or digest_weights(model),
        weights_revision=str(getattr(config, "_commit_hash", None) or ""),
        config=plain(config.to_dict()),
        attention=str(getattr(config, "_attn_implementation", None) or ""),
        weight_quantisation=plain(quantiser.quantization_config.to_dict()) if quantiser else None,
        compute_dtype=f"{model.dtype};matmul={matmul_precision()}",
        kv_dtype=kv_dtype,
        codec=codec or {"name": "none"},
        layout=layout,
        layers=(0, kv_shape[0]),
        kv_heads=(0, kv_shape[1]),
        rope=_unsaved(model, attributes),
        adapter_digest=_digest_adapters(model),
        salt=salt,
    )


def digest_weights(model: torch.nn.Module) -> bytes:
    """SHA-256 over (name, dtype, shape, SHA-256 of the bytes) of every parameter and persistent buffer, and
    of whatever else the model would save, sorted. Raises InvalidArgument for what has no plain bytes.
    """
    added = {id(p) for module in adapters(model) for p in adapter_parameters(module)}
    with as_they_lie() as panels:
        state = model.state_dict(keep_vars=True)
    parts = [part for name, value in state.items() for part in _parts(name, value)]
    named = [(name, tensor) for name, tensor in parts if id(tensor) not in added]
    streams = streams_of(model)
    if streams is None:
        return _digest_tensors(named, panels)
    moving = {(id(module), attribute) for module, attribute in streams.moving()}
    keys = {name: key for name, key in _places(model).items() if key in moving}
    if not streams.digests.keys() >= set(keys.values()):  # once, or where a module was put back since
        streams.digests |= _digest_streamed(streams, moving)  # each load is verified from then on
    rows = _digest_rows([(name, tensor) for name, tensor in named if name not in keys], panels)
    rows += [[name, *streams.digests[key]] for name, key in keys.items()]
    return hashlib.sha256(encode(sorted(rows))).digest()


def _places(model: torch.nn.Module) -> dict[str, tuple[int, str]]:
    """Of each parameter and buffer, by all its names: the id of its module, and its name there."""
    return {
        f"{name}.{attribute}" if name else attribute: (id(module), attribute)
        for name, module in model.named_modules(remove_duplicate=False)
        for attribute in (*module._parameters, *module._buffers)
    }


def _digest_streamed(streams: Any, moving: Set[tuple[int, str]]) -> dict[tuple[int, str], list[Any]]:
    """Of each weight that is streamed, by its place: dtype, shape and SHA-256."""
    found: dict[tuple[int, str], list[Any]] = {}
    for layer in streams.filled_layers():
        with as_they_lie() as lying:
            state = layer.state_dict(keep_vars=True)
        keys = _places(layer)
        rows = _digest_rows([(name, held) for name, held in state.items() if keys.get(name) in moving], lying)
        found |= {keys[name]: row for name, *row in rows}
    return found | {(id(module), "weight"): row for module, *row in streams.digested_tables()}


def _parts(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of what a state_dict has under this name; plain values as one of their text's bytes. Raises
    InvalidArgument for what is neither: two models may differ in nothing else.
    """
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if (text := plain_text(value)) is not None:
        return [(f"{name}:text", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]
    if isinstance(value, tuple | list | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [part for key, item in items for part in _parts(f"{name}.{key}", item)]
    what = f"{name}, a {type(value).__name__}, has no plain bytes to digest"
    raise InvalidArgument(f"{what}; pass weights_digest=")


# ---------------------------------------------------------------- digests


def _digest_tensors(named: Iterable[tuple[str, torch.Tensor]], panels: Set[int] = frozenset()) -> bytes:
    return hashlib.sha256(encode(_digest_rows(named, panels))).digest()


def _digest_rows(
    named: Iterable[tuple[str, torch.Tensor]], panels: Set[int] = frozenset()
) -> list[list[Any]]:
    """By name: its dtype, shape and the SHA-256 of its bytes; of packed words, whose ids are panels, in the
    checkpoint's order.
    """
    named = sorted(named, key=lambda item: item[0])
    # A tied tensor has several names and is read once.
    unique = {_place(tensor): tensor for _, tensor in named}

    def read(tensor: torch.Tensor) -> bytes:
        return _digest_bytes(from_panels(tensor) if id(tensor) in panels else tensor)

    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as threads:
        digests = dict(zip(unique, threads.map(read, unique.values()), strict=True))
    return [[n, str(t.dtype), list(t.shape[id(t) in panels :]), digests[_place(t)]] for n, t in named]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _digest_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "meta":
        raise InvalidArgument("a weight lies on the meta device: its bytes are not there to digest")
    try:
        if tensor.is_quantized:
            raise TypeError("its bytes are without their scale")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        kind = f"{type(tensor).__name__} of {tensor.dtype}"
        raise InvalidArgument(
            f"a weight ({kind}) has no plain bytes to digest; pass weights_digest="
        ) from error
    return hashlib.sha256(flat).digest()


def _unsaved(model: torch.nn.Module, attributes: Attributes) -> dict[str, Any]:
    """What no state_dict has: tables of rotary angles and other buffers, numbers, tensors, code."""
    buffers = [
        (f"{name}.{key}", module._buffers[key])
        for name, module in model.named_modules()
        for key in module._non_persistent_buffers_set
        if module._buffers.get(key) is not None
    ]
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return {
        "buffers": _digest_tensors(buffers),
        "tensors": _digest_tensors(attributes.tensors()),
        "numbers": attributes.numbers(),
        "code": attributes.code(),
        "parameters": plain(parameters),
    }


# ---------------------------------------------------------------- adapters (peft, never imported here)


def _digest_adapters(model: torch.nn.Module) -> bytes:
    modules = [(n, m) for n, m in model.named_modules() if type(m).__module__.startswith("peft.")]
    if not modules:
        return b""
    states = [[name, type(module).__name__, adapter_state(module)] for name, module in modules]
    tensors = [
        (f"{name}.{i}", parameter.data)
        for name, module in modules
        for i, parameter in enumerate(adapter_parameters(module))
    ]
    return hashlib.sha256(encode([states, _digest_tensors(tensors)])).digest()


def plain(value: Any) -> Any:
    """A configuration's values with torch's and enums' own types spelled out."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return value
