"""The digest of a LoRA adapter's files, for the keys of the requests that use it.

Owns what was digested, by the adapter's number in this engine; never loads one. Invariants: files that have
not changed are read once; an adapter whose files change while its number lives shares nothing from then on,
for nobody knows which of the two contents the engine has in memory.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.integrations.checkpoint import checkpoint_digest

log = logging.getLogger("vllm.kvstored")
MAX_KNOWN = 4096


class Adapters:
    """Of one scheduler."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Any, bytes | None]] = {}

    def digest(self, request: Any) -> bytes:
        """Of vLLM's LoRARequest. Random bytes, which nobody else has, where nothing may be shared."""
        if getattr(request, "load_inplace", False):
            return os.urandom(32)  # its files are read again behind a number that is known
        number = (int(request.lora_int_id), str(request.lora_path))
        state = _state(request.lora_path)
        if number not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[number] = (state, self._read(request) if state else None)
        before, digest = self._known[number]
        if digest is not None and before != state:
            log.warning(
                "kvstored: the files of adapter %s changed while it was in use: its requests share nothing",
                request.lora_name,
            )
            self._known[number] = (before, None)
        return self._known[number][1] or os.urandom(32)

    @staticmethod
    def _read(request: Any) -> bytes | None:
        try:
            return checkpoint_digest(request.lora_path)
        except (InvalidArgument, OSError) as error:
            log.warning(
                "kvstored: adapter %s cannot be told apart and shares nothing: %s", request.lora_name, error
            )
            return None


def _state(directory: str) -> tuple[Any, ...] | None:
    """What changes when a file does, without reading it. None: there is no such directory."""
    root = Path(directory)
    try:
        found = [(path, path.stat()) for path in sorted(root.rglob("*"))] if root.is_dir() else []
    except OSError:
        return None
    return tuple((str(path), at.st_size, at.st_mtime_ns, at.st_ino) for path, at in found) or None
