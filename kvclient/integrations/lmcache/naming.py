"""Under which keys LMCache's objects lie in the store: its own object key beneath the weights' identity.

Owns the list of what must match; never touches an object. Invariant: two engines share a key only if the
weights and every field of LMCache's key are equal; what an object's bytes mean (type, shape, arrangement) is
its tag, compared at the load, because LMCache does not say it when it asks whether an object is there.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kvclient._core import DerivedKeys
from kvclient.errors import InvalidArgument
from kvclient.integrations.checkpoint import checkpoint_digest
from kvclient.integrations.objects import TAG_BYTES

VERSION = 2


class Identities:
    """What tells the weights of each model apart, as the configuration says it.

    `model_identity` and `model_path` are one text, for every model, or a mapping from LMCache's model names.
    Raises InvalidArgument if neither is given, and for a path without weights.
    """

    def __init__(self, model_identity: Any, model_path: Any) -> None:
        if not model_identity and not model_path:
            raise InvalidArgument(
                'LMCache keys a model by its name only; say "model_path" (the directory of the weights, or a '
                'directory for each model name) or "model_identity" (a name that changes with the weights)'
            )
        self._known: dict[str | None, bytes] = {}
        for model, text in _each(model_identity):
            self._known[model] = _digest(b"given", str(text).encode())
        for model, path in _each(model_path):
            self._known[model] = _digest(b"weights", checkpoint_digest(path))

    def of(self, model_name: str) -> bytes | None:
        """None: nobody said which weights that name has, so nothing of it is shared."""
        return self._known.get(model_name, self._known.get(None))


def _each(objects: Any) -> list[tuple[str | None, Any]]:
    if not objects:
        return []
    return list(objects.items()) if isinstance(objects, Mapping) else [(None, objects)]


def _digest(*parts: bytes) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()


_NUMBERS = struct.Struct("<IQI")


def shared_keys(identity: bytes, model_name: str, rank: int, group: int, salt: str) -> DerivedKeys:
    """Keys beneath all that many objects share: what is hashed is each object's chunk."""
    whole = hashlib.sha256()
    for part in (identity, _NUMBERS.pack(VERSION, rank, group), model_name.encode(), salt.encode()):
        whole.update(len(part).to_bytes(8, "little") + part)
    return DerivedKeys(whole.digest())


def tag_of(memory_object: Any) -> bytes:
    """Of what its bytes mean."""
    meta = memory_object.metadata
    parts = zip(meta.dtypes or (), map(tuple, meta.shapes or ()), strict=True)
    return _tag(meta.dtype, tuple(meta.shape), meta.fmt, tuple(parts))


@lru_cache(1024)  # an engine has few
def _tag(dtype: Any, shape: tuple[int, ...], fmt: Any, parts: tuple[Any, ...]) -> bytes:
    text = repr([str(dtype), shape, getattr(fmt, "name", fmt), str(list(parts))])
    return hashlib.sha256(text.encode()).digest()[:TAG_BYTES]
