"""What attach() was told about every call of its model.

Owns the bounds of these values. Never changes after attach().
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from kvclient.blocks.chunker import Chunker
from kvclient.checks import check_bounds, whole_seconds
from kvclient.errors import InvalidArgument
from kvclient.hf.attention.handle import Reader
from kvclient.hf.cache.page_pool import PagePool

MAX_PRIORITY, MAX_FOLLOW_S = 100, 3600
STATE_EVERY_BLOCKS, MOST_EVERY = 16, 1 << 20


@dataclass(frozen=True)
class Options:
    chunker: Chunker  # the rule that prompts are cut into blocks by
    priority: int
    ttl_s: float | None
    follow: bool
    follow_timeout_s: float
    publish_generated: bool
    chunked_reads: bool  # this transformers can prefill in chunks behind a filled cache
    cache_name: str  # the argument that the model takes its cache in
    in_place: Reader | None = None  # the model's attention reads blocks where they lie
    static: bool = False  # decoding does not move the tail; its step is recorded where it can be
    pool: PagePool | None = None  # …and what it computes lies in pages of this one
    publish_tokens: int | None = None  # of a prompt, at most; None: all, and generated text
    tails: bool = False  # what is left behind a text's last whole block has a block of its own
    search: bool = True  # behind the prefix too, where the model allows it
    room: int | None = None  # for tokens behind a prompt, to begin with; None: for all it may say, to a bound
    state_every_blocks: int = STATE_EVERY_BLOCKS  # between two stored states of recurrent layers
    raises: bool = False  # a store that fails ends the call, which else goes on without

    def checked(self) -> Options:
        """The same. Raises InvalidArgument for what a user may not say: asked where they say it."""
        check_bounds("state_every_blocks", self.state_every_blocks, 1, MOST_EVERY)
        check_bounds("priority", self.priority, 0, MAX_PRIORITY)
        whole_seconds(self.ttl_s)
        if not isinstance(self.follow_timeout_s, Real) or not 0 < self.follow_timeout_s <= MAX_FOLLOW_S:
            limits = f"it must be above 0 and at most {MAX_FOLLOW_S}"
            raise InvalidArgument(f"follow_timeout_s={self.follow_timeout_s!r}; {limits}")
        return self


def raising(on_error: str) -> bool:
    """Whether a store that fails ends the call. Raises InvalidArgument for another word than the two."""
    if on_error not in ("miss", "raise"):
        raise InvalidArgument(f'on_error={on_error!r}; it must be "miss" or "raise"')
    return on_error == "raise"
