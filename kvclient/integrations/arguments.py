"""What of an engine's arguments and environment shapes the KV that it computes, as text that is equal in all
processes.

Owns how values become text and which files count by their content; never knows an engine. Invariant: what
nobody said to be without effect counts, whatever it is called.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.integrations.checkpoint import content_digest

# of libraries beneath all engines: how precisely products are computed
NUMERIC_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
MAX_DEPTH = 16


def counted(arguments: Mapping[str, Any], without: Iterable[str]) -> dict[str, Any]:
    """Arguments by name, but those without effect on KV. Raises InvalidArgument for a value that has no text
    of its own, and for a file that cannot be read.
    """
    left_out = set(without)
    return {name: plain(name, value) for name, value in arguments.items() if name not in left_out}


def plain(name: str, value: Any, depth: int = 0) -> Any:
    """A value as JSON has it. A text that names a file or a directory is its content: the same file lies
    elsewhere on another host, and tomorrow another may lie there. Raises InvalidArgument, also for a
    directory of too many files, and for a value whose text leaves something out.
    """
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"{name} is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        return {"content": _content(name, text)} if os.path.isfile(text) or os.path.isdir(text) else text
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): plain(name, part, depth + 1)
                for key, part in value.items()}  # fmt: skip
    if isinstance(value, list | tuple):
        return [plain(name, part, depth + 1) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(name, part, depth + 1) for part in value), key=repr)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _whole(name, value, f"{value.__module__}.{value.__qualname__}")
    if (fields := fields_of(value)) is not None:
        parts = {field: plain(f"{name}.{field}", part, depth + 1) for field, part in fields.items()}
        return [type(value).__name__, parts]
    return [type(value).__name__, _whole(name, value, repr(value))]


def environment(prefixes: tuple[str, ...], without: re.Pattern[str]) -> dict[str, str]:
    """The variables that an engine reads, but those without effect on KV."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in NUMERIC_VARIABLES or (name.startswith(prefixes) and not without.search(name))
    }


def _content(name: str, place: str) -> str:
    try:
        return content_digest(place).hex()
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error


def _whole(name: str, value: Any, text: str) -> str:
    """The text, where another value would have another: not of an array, which is rounded and cut short."""
    is_array = hasattr(type(value), "__array__") and hasattr(type(value), "__len__")
    if is_array or re.search(r" at 0x[0-9a-f]+|\.\.\.|<lambda>|<locals>", text):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, which has no text that tells it apart")
    return text


def fields_of(value: Any) -> dict[str, Any] | None:
    """Of a record: a dataclass, pydantic's model, msgspec's struct, a namespace. None: it is none."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, types.SimpleNamespace):
        return dict(vars(value))
    for names in ("model_fields", "__struct_fields__"):
        if (found := getattr(type(value), names, None)) is not None:
            return {name: getattr(value, name) for name in found}
    return None
