"""Prefill here, decode elsewhere: a prompt whose KV is being computed is handed to another process, on this
host or on one whose daemon is this one's peer.

    handoff = kv.handoff(**inputs)                         # at once: the prefill goes on in a thread
    text = other.resume(Handoff.from_json(sent), max_new_tokens=50)

Owns what is said of the prompt. Never sends KV: blocks come by the store, layer by layer as they are
computed. Invariant: resume() answers as generate() of the same prompt does, whatever has become of the
prefill; what does not come is computed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument

VERSION = 1
MOST_TOKENS = 1 << 20
MOST_JSON_BYTES = 32 << 20
CLAIM_S = 30.0  # for the prefill to begin; a long digest of the model may come before it
FETCH_S = 5.0  # for the first layer, beside what this host has


@dataclass(frozen=True)
class Handoff:
    """A prompt whose KV is, or is being, computed under this identity."""

    identity: bytes  # 32 bytes: what must be the same where it is resumed
    token_ids: tuple[int, ...]
    block_tokens: int  # of whole blocks; what is left behind the last is computed where it is resumed
    _prefill: Prefill | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> str:
        """A text for the other host: the identity, the block size and the token ids, which name the keys."""
        said = {"version": VERSION, "identity": self.identity.hex(), "block_tokens": self.block_tokens}
        return json.dumps({**said, "token_ids": list(self.token_ids)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Handoff:
        """Raises InvalidArgument for what to_json() cannot have said."""
        if len(text) > MOST_JSON_BYTES:
            raise InvalidArgument(f"a handoff of {len(text)} bytes, the limit is {MOST_JSON_BYTES}")
        try:
            said = json.loads(text)
            if said["version"] != VERSION:
                raise InvalidArgument(f"a handoff of version {said['version']!r}; this is {VERSION}")
            ids, size = tuple(said["token_ids"]), said["block_tokens"]
            identity = bytes.fromhex(said["identity"])
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(f"no handoff: {error!r:.200}") from None
        if len(identity) != 32 or type(size) is not int or not all(type(token) is int for token in ids):
            raise InvalidArgument("no handoff: an identity of 32 bytes and whole numbers are wanted")
        check_bounds("token_ids", len(ids), 1, MOST_TOKENS)
        check_bounds("block_tokens", size, 1, MOST_TOKENS)
        if not all(0 <= token < 1 << 31 for token in ids):
            raise InvalidArgument("no handoff: a token id beyond 31 bits")
        return cls(identity, ids, size)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the prefill has ended, waited for so long; where it runs. Raises what it raised."""
        return self._prefill is None or self._prefill.wait(timeout_s)


class Prefill:
    """A thread that computes a prompt and publishes its blocks."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="kvclient-handoff", daemon=True).start()

    def _run(self) -> None:
        try:
            self._compute()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float | None) -> bool:
        ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return ended


def hand_off(attachment: Any, model: torch.nn.Module, inputs: dict[str, Any]) -> Handoff:
    """Begins the prefill, and returns once its blocks can be found. Raises InvalidArgument for more than one
    row, or padding."""
    ids = inputs.get("input_ids")
    mask = inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
        raise InvalidArgument("a handoff is of one prompt: input_ids of shape [1, tokens]")
    if mask is not None and not bool(mask.all()):
        raise InvalidArgument("a handoff's prompt has no padding")
    check_bounds("tokens", ids.shape[1], 1, MOST_TOKENS)
    token_ids = tuple(ids[0].tolist())
    identity, chunker, client = attachment.identity, attachment.chunker, attachment.client
    # One more token than is kept: generate() wants to make one.
    prefill = Prefill(lambda: model.generate(**{**inputs, "max_new_tokens": 1, "do_sample": False}))
    handoff = Handoff(identity, token_ids, chunker.block_tokens, prefill)
    # The last: a decoder that asks for a block before it is claimed is told that there is none.
    last = chunker.chain(identity, ids[0].to("cpu", torch.int32).numpy())[-1:]
    end = time.monotonic() + CLAIM_S
    while len(last) and not client.lookup(last).states[0] and time.monotonic() < end:
        if prefill.wait(0.0005):
            break
    return handoff


def resume(attachment: Any, model: torch.nn.Module, handoff: Handoff, options: dict[str, Any]) -> Any:
    """generate() of the handed prompt, which takes what has been computed of it. Raises InvalidArgument where
    the model, its dtype or the way it is cut is another than where it was handed off."""
    if handoff.identity != attachment.identity:
        raise InvalidArgument(
            f"the handoff is of identity {handoff.identity.hex()[:16]}…, this model's is "
            f"{attachment.identity.hex()[:16]}…: its KV would not be this model's"
        )
    if handoff.block_tokens != attachment.chunker.block_tokens:
        raise InvalidArgument(
            f"the handoff has blocks of {handoff.block_tokens} tokens, here they have "
            f"{attachment.chunker.block_tokens}: attach with block_tokens={handoff.block_tokens}"
        )
    ids = torch.tensor([handoff.token_ids], device=model.device)
    chain = attachment.chunker.chain(handoff.identity, ids[0].to("cpu", torch.int32).numpy())
    held = attachment.client.get(chain, follow=True, wait_s=FETCH_S) if len(chain) else None
    try:  # held, so that nothing of it is evicted before generate() has it; it follows what is still to come
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        if held is not None:
            held.release()
