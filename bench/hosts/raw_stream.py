"""One raw stream of Python, TCP or TLS: the yardstick that `bench.hosts` holds a fetch against.

    python -m bench.hosts.raw_stream ADDRESS [CERTIFICATE KEY]

serves: whoever connects sends eight bytes, a count, and gets so many bytes out of memory. Standard library
only, one thread a connection, buffers made once. Nothing is checked of what passes.
"""

import socket
import ssl
import struct
import subprocess
import sys
import threading

MOST = 64 << 20


def serve(address: str, certificate: str = "", key: str = "") -> None:
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
    memory = memoryview(bytearray(b"\x5a" * MOST))
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=_answer, args=(peer, context, memory), daemon=True).start()


def _answer(peer: socket.socket, context: ssl.SSLContext | None, memory: memoryview) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        stream = context.wrap_socket(peer, server_side=True) if context else peer
        while asked := stream.recv(8):
            stream.sendall(memory[: struct.unpack("<Q", asked)[0]])
    except OSError:
        return


class Raw:
    """A server in a process of its own, and streams to it."""

    def __init__(self, address: str, tls: tuple[str, str, str] | None = None) -> None:
        """`tls`: certificate, key, authority."""
        command = [sys.executable, "-m", "bench.hosts.raw_stream", address, *(tls[:2] if tls else ())]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout
        self._at = (address, int(self._server.stdout.readline()))
        self._authority = tls[2] if tls else ""
        self._memory = memoryview(bytearray(MOST))
        self.streams = [self._connect() for _ in range(4)]

    @property
    def pid(self) -> int:
        return self._server.pid

    def _connect(self) -> socket.socket:
        plain = socket.create_connection(self._at)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._authority:
            return plain
        context = ssl.create_default_context(cafile=self._authority)
        context.check_hostname = False
        return context.wrap_socket(plain)

    def fetch(self, count: int, streams: int = 1) -> None:
        """So many bytes into memory, an equal part over each of 1 or 4 streams."""
        part = count // streams
        parts = [self._memory[i * part : (i + 1) * part] for i in range(streams)]
        others = list(zip(self.streams, parts, strict=False))[1:]
        threads = [threading.Thread(target=self._take, args=task) for task in others]
        for thread in threads:
            thread.start()
        self._take(self.streams[0], parts[0])
        for thread in threads:
            thread.join()

    def _take(self, stream: socket.socket, to: memoryview) -> None:
        stream.sendall(struct.pack("<Q", len(to)))
        while to:
            to = to[stream.recv_into(to) :]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self._server.kill()
        self._server.wait()


if __name__ == "__main__":
    serve(*sys.argv[1:])
