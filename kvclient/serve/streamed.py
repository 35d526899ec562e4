"""A server's model whose layers are read from the disk as they compute, or on a GPU come from the host's
memory, in so much memory as it was given.

Owns how that memory is shared between layers and requests. Never reads a layer. Invariant: what is held, the
KV of all requests that run, and the widest pass of theirs are no more than --memory, as the planner counts; a
draft model and --store are beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.hf import Engine
from kvclient.hf.streaming import StreamingConfig
from kvclient.hf.streaming.planner.asked import asked_of
from kvclient.hf.streaming.residency import DEVICES
from kvclient.serve.scheduler import Limits

ROOM_TOKENS = 4096  # of requests that the layers that stay leave room for, where that can be


def streamed(
    model: str, client: Any, dtype: Any, device: str, memory: int, keywords: dict[str, Any]
) -> Engine:
    """The Engine of a directory under a limit of memory, in bytes: of a GPU that is named, or else of the
    CPU. Raises InvalidArgument for another device, and what Engine.from_pretrained() does.
    """
    device = "cpu" if device == "auto" else device
    if device.partition(":")[0] not in DEVICES:
        raise InvalidArgument(f"--memory with --device {device}; it must be one of {', '.join(DEVICES)}")
    config = StreamingConfig(memory=memory, room_tokens=ROOM_TOKENS, device=device)
    return Engine.from_pretrained(model, client, dtype=dtype, streaming=config, **keywords)


def limited(engine: Engine, limits: Limits) -> Limits:
    """Fewer tokens of KV where what was given to the model has room for no more; as they are of a model
    without a limit. Raises InvalidArgument where not one token has room.
    """
    if (asked := asked_of(engine.model)) is None:
        return limits
    rows = limits.max_batch * limits.step_tokens
    room = asked.serve(engine.model, limits.most, rows)
    if room < 2:
        told = f"of --memory {asked.memory} the model leaves no room for a request of {rows} rows a step"
        raise InvalidArgument(f"{told} and {limits.piece_tokens} tokens of a prompt at one time")
    memory = min(limits.memory_tokens, room)
    return dataclasses.replace(limits, memory_tokens=memory, alone_whole=True)  # each piece reads all layers
