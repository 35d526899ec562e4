"""The reuse identity: 32 bytes that differ as soon as anything differs that KV depends on.

Owns the list of dimensions, the deny-list of a model's configuration and the encoding that is hashed. Knows
no tensor and no model: what computes the dimensions of a live model is kvclient.hf.model.identity.
Invariant: two
identities are equal only if every dimension is equal, because the encoding is injective: each value carries
its type and its length, and mappings are sorted by the encoding of their keys.

    identity = SHA-256("kvi1" | encode({name: value, … all dimensions}))
    encode:  N | T | F | i u64-length text | f 8 bytes | s u64-length utf-8 | b u64-length bytes
             l u64-count items | m u64-count (key value)…
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvclient.errors import InvalidArgument

IDENTITY_DOMAIN = b"kvi1"
KEY_SCHEME = 1  # version of the keys in docs/formats.md §4; a new scheme must not find blocks of the old one
DIGEST_BYTES = 32

# What a configuration says that KV cannot depend on. Everything not named here is part of the identity, so a
# field of a future release is safe before anybody has thought about it. The dtypes are dimensions of their
# own.
CONFIG_DENY_LIST = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """All that must be equal for KV to be reusable (docs/design.md §8). Nothing has a default, so nothing is
    forgotten.
    """

    weights_digest: bytes  # of every tensor as it lies in memory, adapters excluded
    weights_revision: str  # what the weights call themselves, "" if nothing
    config: Mapping[str, Any]  # the whole configuration after overrides; the deny-list is applied here
    attention: str  # the attention implementation: an override that the configuration's mapping leaves out
    weight_quantisation: Mapping[str, Any] | None  # run-time quantisation of the weights
    compute_dtype: str
    kv_dtype: str
    codec: Mapping[str, Any]  # name and parameters
    layout: bytes  # the blob the daemon registers
    layers: tuple[int, int]  # first and one past the last of the model's layers in a block
    kv_heads: tuple[int, int]  # the same of its KV heads: a shard
    rope: Mapping[str, Any]  # and what else no file of weights has: unsaved buffers, numbers, code
    adapter_digest: bytes  # of the adapters in effect, b"" if none
    salt: bytes
    key_scheme: int = KEY_SCHEME


def reuse_identity(dimensions: Dimensions) -> bytes:
    """32 bytes. Raises InvalidArgument for a value that has no canonical encoding."""
    fields = {field.name: getattr(dimensions, field.name) for field in dataclasses.fields(dimensions)}
    fields["config"] = without_denied(dimensions.config)
    return hashlib.sha256(IDENTITY_DOMAIN + encode(fields)).digest()


def salted(namespace_salt: bytes, salt: bytes) -> bytes:
    """The salt of an identity from the namespace's, which the daemon hands out, and the caller's own. A
    namespace without one changes nothing."""
    return encode([namespace_salt, salt]) if namespace_salt else salt


def salt_of(salt: bytes | str | None) -> bytes:
    """The bytes of a caller's salt. bytes() would take a number for so many zeros. Raises InvalidArgument for
    what is neither bytes, a text nor None.
    """
    if not isinstance(salt, bytes | bytearray | str | None):
        raise InvalidArgument(f"salt={salt!r:.80}; it must be bytes, a text, or None")
    return salt.encode() if isinstance(salt, str) else bytes(salt or b"")


def without_denied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the deny-list's fields, sub-configurations included."""
    return {
        key: without_denied(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in CONFIG_DENY_LIST
    }


_length = struct.Struct("<Q").pack


def encode(value: Any) -> bytes:
    """The canonical bytes of None, bool, int, float, str, bytes, sequences and mappings of those."""
    parts: list[bytes] = []
    _encode(value, parts)
    return b"".join(parts)


def _encode(value: Any, out: list[bytes]) -> None:
    kind = type(value)  # of what code and configurations are made of; what is derived from these goes below
    if kind is str:
        data = value.encode()
        out.append(b"s" + _length(len(data)) + data)
    elif kind is tuple or kind is list:
        out.append(b"l" + _length(len(value)))
        for item in value:
            _encode(item, out)
    elif value is None:
        out.append(b"N")
    elif isinstance(value, bool):
        out.append(b"T" if value else b"F")
    elif isinstance(value, int):
        _text(b"i", str(int(value)).encode(), out)
    elif isinstance(value, float):
        out.append(b"f" + struct.pack("<d", value))
    elif isinstance(value, str):
        _text(b"s", str(value).encode(), out)
    elif isinstance(value, (bytes, bytearray)):
        _text(b"b", bytes(value), out)
    elif isinstance(value, Mapping):
        items = sorted(((_key(key), item) for key, item in value.items()), key=lambda pair: pair[0])
        _mapping(items, out)
    elif isinstance(value, (set, frozenset)):
        _encode(sorted(value), out)
    elif isinstance(value, Sequence):
        out.append(b"l" + struct.pack("<Q", len(value)))
        for item in value:
            _encode(item, out)
    else:
        raise InvalidArgument(f"{value!r:.80} of type {type(value).__name__} has no canonical encoding")


def _mapping(items: list[tuple[bytes, Any]], out: list[bytes]) -> None:
    out.append(b"m" + struct.pack("<Q", len(items)))
    for key, item in items:
        out.append(key)
        _encode(item, out)


def _key(key: Any) -> bytes:
    # JSON turns the keys of id-like mappings into text and back; an int and its text stay different here.
    if not isinstance(key, (str, int)):
        raise InvalidArgument(f"mapping key {key!r:.80} of type {type(key).__name__}; it must be text or int")
    parts: list[bytes] = []
    _encode(key, parts)
    return parts[0]


def _text(tag: bytes, data: bytes, out: list[bytes]) -> None:
    out.append(tag + struct.pack("<Q", len(data)) + data)
