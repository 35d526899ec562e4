"""A peer that knows the salt and lies: kvstored's own protocol, with answers that a test makes."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from kvstored.cluster import frames
from kvstored.cluster.frames import Broken, Frame, Stream

WATCH, HOLDS, PUSHED = 18, 19, 25


def marks(keys: list[bytes]) -> bytes:
    """What says that these are there (native/core/store/journal.h)."""
    return b"".join(struct.pack("<Q", int.from_bytes(key[16:24], "little") | 1) for key in keys)


class Liar:
    """Listens at an address as node `name`. answer(socket, frame of the fetch): what it says to it."""

    def __init__(self, address: str, name: str, caller: str, salt: bytes, keys: list[bytes]):
        host, _, port = address.partition(":")
        self._listener = socket.create_server((host, int(port)))
        self._name, self._caller, self._salt, self._keys = name, caller, salt, keys
        self.answer: Callable[[socket.socket, Frame], None] = lambda _to, _fetch: None
        self.pushes = b""  # keys, without being asked for any
        self.asked = 0
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(plain)
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        stream = Stream(plain)
        with contextlib.suppress(Broken, OSError, ValueError):
            frames.admit(stream, self._name, {"default": self._salt}, self._caller)
            while not self._closed:
                asked = stream.take(None)
                if asked.kind == frames.PING:
                    stream.send(frames.frame(frames.PONG, request=asked.request))
                elif asked.kind == WATCH:
                    told = Frame(HOLDS, 0, asked.request, 1, marks(self._keys))
                    stream.send(told.encoded(0, asked.request))
                    if self.pushes:
                        stream.send(Frame(PUSHED, 0, asked.request, 0, self.pushes).encoded(0, asked.request))
                else:
                    self.asked += 1
                    self.answer(plain, asked)
        plain.close()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        for plain in self._open:
            with contextlib.suppress(OSError):
                plain.shutdown(socket.SHUT_RDWR)


def recorded(address: str, node: str, peer: str, salt: bytes, key: bytes) -> list[Frame]:
    """The frames in which a daemon answers for a block."""
    host, _, port = address.partition(":")
    stream = Stream(socket.create_connection((host, int(port)), timeout=30))
    try:
        frames.introduce(stream, node, "default", salt, peer)
        return frames.fetch(stream, [key], 1)[key]
    finally:
        stream.close()
