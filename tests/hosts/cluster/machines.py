"""Hosts that are dictionaries, as a pool sees Mooncake: one that is dead answers no, one that stands still
does not answer before the test ends. And a block for them."""

import os
import struct
import threading

from kvstored import _core
from kvstored.cluster import frames
from kvstored.cluster.frames import Frame
from kvstored.cluster.mooncake import Place

WAIT_S = 30.0
KEY = bytes(range(32))


def block(tokens: int = 4, bytes_per_token: int = 64, layers: int = 2, meta: int = 24) -> list[Frame]:
    """The frames in which a daemon answers for a block of random bytes."""
    blob = b"KVL1" + struct.pack(
        f"<{9 + layers}I", layers, 2, 1, 1, 0, tokens, 0, meta, 0, *[bytes_per_token] * layers
    )
    places = _core.places(blob, tokens)
    head = KEY + bytes(32) + struct.pack("<QIIIIII", 0, tokens, 0, 0, 0, 0, layers)
    parts = [Frame(frames.LAYER, 0, 0, i, os.urandom(count)) for i, (_, count) in enumerate(places.layers)]
    meta_area = Frame(frames.META, 0, 0, 0, os.urandom(places.meta_bytes))
    first = [Frame(frames.LAYOUT, 0, 0, 0, blob), Frame(frames.BLOCK_HEAD, 0, 0, 0, head)]
    return [*first, meta_area, *parts, Frame(frames.WHOLE, 0, 0, 0, b"")]


class Machines:
    """Objects on hosts, by segment s0.. at endpoint e0.."""

    segment, endpoint = "s0", "e0"

    def __init__(self, count: int) -> None:
        self.objects: dict[str, dict[str, bytes]] = {f"e{i}": {} for i in range(count)}
        self.dead: set[str] = set()
        self.still: set[str] = set()
        self.over = threading.Event()
        self.asked: list[str] = []

    def hosts(self) -> dict[str, str]:
        return {f"s{i}": f"e{i}" for i in range(len(self.objects))}

    def _at(self, endpoint: str) -> dict[str, bytes] | None:
        self.asked.append(endpoint)
        if endpoint in self.still:
            assert self.over.wait(WAIT_S)
            return None
        return None if endpoint in self.dead else self.objects[endpoint]

    def put(self, name: str, data: bytes, segment: str) -> bool:
        objects = self._at(self.hosts()[segment])
        if objects is not None:
            objects[name] = data
        return objects is not None

    def remove(self, name: str) -> bool:
        return any(objects.pop(name, None) is not None for objects in self.objects.values())

    def places(self, names: list[str]) -> dict[str, Place]:
        return {
            name: Place(endpoint, hash(name), len(objects[name]))
            for name in names
            for endpoint, objects in self.objects.items()
            if name in objects
        }

    def read(self, place: Place, length: int) -> bytes | None:
        objects = self._at(place.endpoint)
        if objects is None:
            return None
        return next(data[:length] for name, data in objects.items() if hash(name) == place.address)

    def read_into(self, place: Place, at: int, extent) -> bool:
        data = self.read(place, place.length)
        if data is None:
            return False
        os.pwrite(extent.fd, data[at : at + extent.length], extent.offset)
        return True
