"""A session spoken by hand: packets of native/core/format/protocol.h built and read without the library.

Owns one socket and the descriptors that came with it. Never checks what it sends: that is what it is for.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import struct
from pathlib import Path

MAGIC = 0x3153564B
VERSION = 5
OLDEST_VERSION = 2
OPS = range(1, 15)
(ATTACH, REGISTER_LAYOUT, CREATE, SEAL, ABORT, LOOK_UP, DELETE,
 TOUCH, STATS, TOKEN, PROMOTE, SUSPECT, KEEP, ALLOW_PINS) = OPS  # fmt: skip
PROMOTE_FROM = 23
HEAD = struct.Struct("<IHHII")
ATTACHED = struct.Struct("<IIQQQQQ16s32s")
PINS_OFFSET = 8192
TOKEN_OFFSET = 8 + 4 * 4 + 16
RING_HEAD_OFFSET = 8 + 4 * 4 + 16 + 16 + 8
CALL_S = 10.0


def request(op: int, count: int, body: bytes = b"", tag: int = 7, magic: int = MAGIC) -> bytes:
    return HEAD.pack(magic, op & 0xFFFF, 0, count & 0xFFFFFFFF, tag) + body


def attach_body(namespace: bytes = b"default", version: int = VERSION, read_only: int = 0, max_pins: int = 64,
                session: int = 0, token: bytes = bytes(16)) -> bytes:  # fmt: skip
    return struct.pack("<IIII16s64s", version, read_only, max_pins, session, token, namespace)


def create_body(
    keys: list[bytes], layout: int, seals: tuple[bytes, ...] = (), seal_count: int | None = None
) -> bytes:
    head = struct.pack("<IIII", layout, 35, 0, len(seals) if seal_count is None else seal_count & 0xFFFFFFFF)
    return head + b"".join(seals) + b"".join(struct.pack("<32sQIIII", key, 0, 16, 0, 0, 0) for key in keys)


def promote_body(keys: list[bytes], priority: int = 35) -> bytes:
    return struct.pack("<II", priority, 0) + b"".join(keys)


def promote_from_body(keys: list[bytes], node: bytes, priority: int = 35) -> bytes:
    return struct.pack("<II64s", priority, 0, node) + b"".join(keys)


def keep_body(items: bytes, more: int = 0) -> bytes:
    return struct.pack("<II", more, 0) + items


def block_item(record: int, generation: int) -> bytes:
    return struct.pack("<IIQ", record & 0xFFFFFFFF, 0, generation)


class Dropped(Exception):
    """The daemon closed the connection."""


class RawSession:
    """One connection; attach() gives it memory."""

    def __init__(self, socket_path: str | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.settimeout(CALL_S)
        self.socket.connect(str(socket_path))
        self.fds: list[int] = []
        self.session = 0

    def send(self, packet: bytes) -> None:
        try:
            self.socket.sendall(packet)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Dropped from error

    def receive(self) -> tuple[int, int, int, bytes]:
        """(op, status, tag, body) of the next reply. Raises Dropped at the end of the connection."""
        try:
            data, control, _flags, _address = self.socket.recvmsg(128 * 1024, socket.CMSG_SPACE(8 * 4))
        except ConnectionResetError as error:
            raise Dropped from error
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self.fds.extend(fds)
        if not data:
            raise Dropped
        magic, op, status, _count, tag = HEAD.unpack_from(data)
        assert magic == MAGIC, "the daemon answers in its own protocol"
        return op, status, tag, data[HEAD.size :]

    def ask(self, packet: bytes) -> tuple[int, bytes]:
        """(status, body) of the reply to this packet."""
        self.send(packet)
        _op, status, _tag, body = self.receive()
        return status, body

    def attach(self, **wrong) -> tuple[int, bytes]:
        status, body = self.ask(request(ATTACH, 1, attach_body(**wrong)))
        if status == 0:
            self.session = ATTACHED.unpack(body)[0]
        return status, body

    def create(self, keys: list[bytes], layout: int) -> list[tuple[int, int, int, int, int]]:
        """(record, status, generation, offset, length) per key."""
        status, body = self.ask(request(CREATE, len(keys), create_body(keys, layout)))
        assert status == 0, body
        return [struct.unpack_from("<IIQQQ", body, 32 * i) for i in range(len(keys))]

    def page(self) -> mmap.mmap:
        """This session's own page, writable, as the kernel lets it have it."""
        _table, _progress, _pool, page = self.fds
        return mmap.mmap(page, os.fstat(page).st_size)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def __enter__(self) -> RawSession:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
