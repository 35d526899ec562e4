"""Which model has which streams.

Owns that table alone. Never keeps a model alive. Invariant: a copy of a streamed model has none.
"""

from __future__ import annotations

import weakref

import torch

from kvclient.hf.streaming.device import DeviceStreams
from kvclient.hf.streaming.streams import Streams

# Not an attribute of the model: what a module has is part of its identity.
_streams: weakref.WeakKeyDictionary[torch.nn.Module, Streams | DeviceStreams] = weakref.WeakKeyDictionary()


def belong(model: torch.nn.Module, streams: Streams | DeviceStreams) -> None:
    """These are the model's from here on."""
    _streams[model] = streams


def streams_of(model: torch.nn.Module) -> Streams | DeviceStreams | None:
    """None: a model whose weights are all in memory for good."""
    return _streams.get(model)


def known(model: torch.nn.Module) -> Streams | DeviceStreams:
    """The same of one that has some. Raises KeyError for another."""
    return _streams[model]
