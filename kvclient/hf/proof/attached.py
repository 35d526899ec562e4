"""An attachment as those see it that are below attach(): the proofs, and the parts of its calls.

Owns nothing. kvclient.hf.attachment.attach has all of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kvclient.blocks.chunker import Chunker
from kvclient.hf.cache.layer import Memory
from kvclient.hf.call import Report, Totals
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.request.load_or_compute import PrefillSpeed
from kvclient.hf.request.returned import Returned
from kvclient.hf.request.served_model import ServedModel
from kvclient.hf.request.tolerance import Rest
from kvclient.hf.reuse.repair import Repair


class Attached(Protocol):
    """An Attachment, which says what each means."""

    client: Any
    padded: bool
    last: Report | None
    _before: dict[str, Any]
    _model_state: Any  # a ModelState
    _local: Any  # a ThisThread
    _running: Any  # a Running
    _warned: set[str]
    _totals: Totals
    _memory: Memory
    _pace: PrefillSpeed
    _rest: Rest
    _returned: Returned

    @property
    def last_here(self) -> Report | None:
        """Of this thread's last call."""

    @property
    def backend(self) -> str:
        """What computes the attention."""

    @property
    def identity(self) -> bytes:
        """32 bytes."""

    @property
    def form(self) -> BlockFormat:
        """Of this thread's blocks."""

    @property
    def chunker(self) -> Chunker:
        """What cuts prompts into blocks."""

    @property
    def repair(self) -> Repair | None:
        """Of what is reused inside prompts."""

    def limited(self, inside: bool = True) -> AbstractContextManager[None]:
        """Within it, this thread's calls reuse no more than this."""

    def set_here(self, **changes: Any) -> AbstractContextManager[None]:
        """Within it, this thread's settings have these values."""

    def _current(self, model: torch.nn.Module) -> ServedModel | None: ...

    def _served(self, modes: bool = True) -> ServedModel: ...
