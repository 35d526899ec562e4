"""A request as the loop computes it, and what it hears of it.

Owns their fields. Invariant: after one Done or Failed nothing more is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.hf.model.structure import Refused
from kvclient.hf.request.continuation import Opened
from kvclient.hf.streaming import RequestTooLarge
from kvclient.serve.engine.drafting import Record
from kvclient.serve.engine.sampling import Chosen, Sampler
from kvclient.serve.engine.text import Text
from kvclient.serve.engine.windowed import Windowing
from kvclient.serve.scheduler import Entry

ROOM_TOKENS = 128


@dataclass(frozen=True)
class Token:
    """`text` is what may be shown now; it may be empty."""

    text: str
    chosen: Chosen


@dataclass(frozen=True)
class Prompt:
    """The prompt is computed; told before the first Token. logprobs: of its tokens, where asked for."""

    cached_tokens: int
    from_disk: int
    from_peer: int
    approximate_tokens: int
    cold_s: float | None  # what computing all of it would take, at the rate of lately; None: not known yet
    logprobs: tuple[Chosen | None, ...] = ()


@dataclass(frozen=True)
class Done:
    reason: str  # "stop" or "length"
    text: str  # the last piece
    stopped: str | None = None  # the stop string that ended it
    window: dict[str, int] | None = None  # what its window holds (kvclient.serve.engine.windowed)
    accepted: int = 0  # tokens that were guessed, and right
    rejected: int = 0


@dataclass(frozen=True)
class Failed:
    status: int
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """What a request hears of what its pass raised."""
        asked = 400 if isinstance(error, Refused | InvalidArgument) else 500
        status = 413 if isinstance(error, RequestTooLarge) else asked
        return cls(status, f"{type(error).__name__}: {error}")


Event = Token | Prompt | Done | Failed


@dataclass(frozen=True)
class Behind:
    """What was found in the blocks of these keys, all but the first behind the one of the first."""

    keys: list[bytes]
    tokens: int


@dataclass(eq=False)
class Job:
    """tell: called from the loop's thread with each event; must not block. salt: of its KV; b"": nobody's."""

    prompt: Sequence[int]
    new_tokens: int
    sampler: Sampler
    text: Text
    tell: Callable[[Event], None]
    ends: frozenset[int] = frozenset()
    salt: bytes = b""
    read: bool = True
    write: bool = True
    prompt_logprobs: int | None = None
    windowing: Windowing | None = None
    codec: str | None = None  # of its blocks; None: the server's
    inside: bool = True  # reuse what stands behind other tokens, where the server does at all
    priority: int | None = None  # of its blocks
    ttl_s: float | None = None
    entry: Entry | None = None
    cancelled: bool = False
    cache: Any = None
    opened: Opened | None = None  # what its prompt is computed into, between the first piece and the last
    tokens: list[int] = field(default_factory=list)
    pieces: int = 0
    kept: int | None = None  # blocks of prompt and answer that are in the store; None: those of the prompt
    apart: bool = False  # only generate() can serve its prompt
    exact: bool = True  # nothing of it is approximate, or computed behind what is
    first: Prompt | None = None
    draft: Record | None = None
    behind: Behind | None = None  # the last look at what its prompt shares inside of a block

    @property
    def room(self) -> int:
        """Tokens of its answer that memory is taken for before they are said."""
        return max(1, min(self.new_tokens - len(self.tokens), ROOM_TOKENS))

    @property
    def said(self) -> list[int]:
        """Its prompt and what was generated."""
        return [*self.prompt, *self.tokens]
