"""What daemons say to each other (native/core/peer/wire.h), spoken by the fabric: as a peer that is asked and
as one that asks.

Owns the frames and the proof of the salt. Never believes a length beyond its bound. Invariant: a frame that
was read has the checksums that it says, or the stream has ended with Broken.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvstored import _core

MAGIC, VERSION, OLDEST_VERSION, NAME_BYTES, KEY_BYTES = 0x3150564B, 3, 2, 64, 32
MOST_KEYS = 64
MOST_PAYLOAD = 1 << 30  # of a layer
HEAD = struct.Struct("<IHHIIQII")
HELLO, CHALLENGE, PROOF, WELCOME, REFUSED, FETCH, LAYOUT, BLOCK_HEAD = range(1, 9)
META, LAYER, WHOLE, MISSING, LOST, WAITING, PING, PONG, BUSY = range(9, 18)
OFFER, ROOM, PLACED, CHECKED, OVER = range(20, 25)  # between a daemon and its own fabric
STEP_S, STALL_S = 1.0, 5.0


class Broken(Exception):
    """The stream is of no more use."""


@dataclass(frozen=True)
class Frame:
    kind: int
    item: int
    request: int
    layer: int
    payload: bytes

    def encoded(self, item: int = 0, request: int = 0) -> bytes:
        head = HEAD.pack(
            MAGIC, self.kind, item, request, self.layer, len(self.payload), _core.crc32c(self.payload), 0
        )
        return head[:-4] + struct.pack("<I", _core.crc32c(head[:-4])) + self.payload


def parse(data: bytes) -> Iterator[Frame]:
    """The frames of a byte string. Raises Broken."""
    at = 0
    while at < len(data):
        frame, at = _decode(data, at)
        yield frame


def _decode(data: bytes, at: int) -> tuple[Frame, int]:
    if len(data) - at < HEAD.size:
        raise Broken("half a frame")
    magic, kind, item, request, layer, count, payload_crc, head_crc = HEAD.unpack_from(data, at)
    if magic != MAGIC or head_crc != _core.crc32c(data[at : at + HEAD.size - 4]):
        raise Broken("no frame")
    payload = data[at + HEAD.size : at + HEAD.size + count]
    if len(payload) != count or _core.crc32c(payload) != payload_crc:
        raise Broken("a payload that its checksum does not match")
    return Frame(kind, item, request, layer, payload), at + HEAD.size + count


class Stream:
    def __init__(self, plain: socket.socket) -> None:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain

    def send(self, *frames: bytes) -> None:
        self._socket.settimeout(STALL_S)
        try:
            self._socket.sendall(b"".join(frames))
        except OSError as error:
            raise Broken(str(error)) from None

    def take(
        self, timeout_s: float | None = STALL_S, most: int = MOST_PAYLOAD, whole_s: float | None = None
    ) -> Frame:
        """The next frame; None: no limit until it begins. `most`: bytes of its payload. `whole_s`: until all
        of it is here; else it may take any time where no two bytes lie STALL_S apart."""
        end = None if whole_s is None else time.monotonic() + whole_s
        head = self._exactly(HEAD.size, timeout_s, end)
        magic, _, _, _, _, count, _, head_crc = HEAD.unpack(head)
        if magic != MAGIC or head_crc != _core.crc32c(head[:-4]) or count > most:
            raise Broken("what came is no frame")
        frame, _ = _decode(head + self._exactly(count, STALL_S, end), 0)
        return frame

    def expect(self, kind: int, count: int) -> bytes:
        frame = self.take(STEP_S, count, STEP_S)  # a stranger's too: no more is read of it, nor for longer
        if frame.kind != kind or len(frame.payload) != count:
            raise Broken("it refused" if frame.kind == REFUSED else "a frame that does not belong here")
        return frame.payload

    def _exactly(self, count: int, timeout_s: float | None, end: float | None) -> bytes:
        found = bytearray()
        try:
            while len(found) < count:
                if end is not None and (timeout_s := end - time.monotonic()) <= 0:
                    raise Broken("it says it too slowly")
                self._socket.settimeout(timeout_s)
                more = self._socket.recv(min(count - len(found), 1 << 20))
                if not more:
                    raise Broken("it hung up")
                found += more
                timeout_s = STALL_S
        except OSError as error:
            raise Broken(str(error)) from None
        return bytes(found)

    def close(self) -> None:
        self._socket.close()


def frame(kind: int, payload: bytes = b"", request: int = 0) -> bytes:
    return Frame(kind, 0, request, 0, payload).encoded(0, request)


def _name(text: str) -> bytes:
    return text.encode().ljust(NAME_BYTES, b"\0")


def _proof(salt: bytes, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(salt, side + hello + challenge, hashlib.sha256)


def spoken_with(hello: bytes) -> int | None:
    """The highest version that who said this and we speak; None: there is none."""
    version, oldest = struct.unpack_from("<II", hello)
    spoken = min(version, VERSION)
    return spoken if spoken >= max(oldest or version, OLDEST_VERSION) else None


def introduce(stream: Stream, node: str, space: str, salt: bytes, expected: str) -> None:
    """As the one that connects. Raises Broken."""
    hello = struct.pack("<II", VERSION, OLDEST_VERSION) + _name(node) + _name(space) + os.urandom(32)
    stream.send(frame(HELLO, hello))
    said = stream.expect(CHALLENGE, 8 + NAME_BYTES + 32 + 32)
    challenge, proof = said[:-32], said[-32:]
    if not OLDEST_VERSION <= struct.unpack_from("<I", challenge)[0] <= VERSION:
        raise Broken("it speaks another version")
    if challenge[8 : 8 + NAME_BYTES] != _name(expected):
        raise Broken(f"it is not {expected}")
    if not hmac.compare_digest(proof, _proof(salt, b"s", hello, challenge)):
        raise Broken("its salt is another")
    stream.send(frame(PROOF, _proof(salt, b"c", hello, challenge)))
    stream.expect(WELCOME, 0)


def admit(stream: Stream, node: str, salts: Mapping[str, bytes], expected: str) -> str:
    """As the one that was called: the namespace that `expected` wants. Raises Broken for anybody else."""
    hello = stream.expect(HELLO, 8 + 2 * NAME_BYTES + 32)
    space = hello[8 + NAME_BYTES : 8 + 2 * NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    spoken = spoken_with(hello)
    known = space in salts and spoken is not None and hello[8 : 8 + NAME_BYTES] == _name(expected)
    salt = salts[space] if known else os.urandom(32)  # a stranger's way is the same
    challenge = struct.pack("<II", spoken or VERSION, 0) + _name(node) + os.urandom(32)
    stream.send(frame(CHALLENGE, challenge + _proof(salt, b"s", hello, challenge)))
    right = hmac.compare_digest(stream.expect(PROOF, 32), _proof(salt, b"c", hello, challenge))
    if not right or not known:
        stream.send(frame(REFUSED))
        raise Broken("a stranger")
    stream.send(frame(WELCOME))
    return space


def fetch(stream: Stream, keys: list[bytes], request: int) -> dict[bytes, list[Frame]]:
    """Blocks as their frames: Layout if it was not told before, Head, Meta, layers, Whole. Raises Broken."""
    stream.send(frame(FETCH, b"".join(keys), request))
    found: list[list[Frame]] = [[] for _ in keys]
    open_items = set(range(len(keys)))
    while open_items:
        taken = stream.take()
        if taken.request != request or taken.item >= len(keys):
            raise Broken("an answer that nobody asked for")
        if taken.kind != WAITING:
            found[taken.item].append(taken)
        if taken.kind in (WHOLE, MISSING, LOST, BUSY):
            open_items.discard(taken.item)
    return {key: all for key, all in zip(keys, found, strict=True) if all[-1].kind == WHOLE}
