"""Redis on a Unix socket, without persistence. Keys are 32 bytes, as ours.

redis-py spends more time than the server on a command of 64 keys, so commands are packed and parsed by
hiredis on a plain socket: the fastest Python client there is, which favours the peer.
"""

import random
import socket
from pathlib import Path

import hiredis

from bench.peers.contract import Call, serve, start_server, stop_server, wait_until

GET_BLOCK_BYTES = 4096
GET_BLOCKS = 4096


class Redis:
    def __init__(self):
        self.server = self.socket = None
        self.reader = hiredis.Reader()

    def setup(self, params):
        self.path = params.get("address") or str(Path(params["dir"]) / "redis.sock")
        if "address" not in params:
            # The pathname of a Unix socket is short: the caller gives a short directory.
            self.server = start_server(
                [
                    params["redis_server"],
                    "--port",
                    "0",
                    "--unixsocket",
                    self.path,
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                    "--maxclients",
                    "64",
                    "--dir",
                    params["dir"],
                ],
                Path(params["dir"]) / "redis.log",
                params.get("env"),
            )
            self.server_pid = self.server.pid
        wait_until(self.connect, "redis-server")
        self.rng = random.Random(7)
        if "address" not in params and params["dataset"] == "index":
            self.load(params["blocks"])
        version = next(
            line for line in self.command(b"INFO", b"server").decode().splitlines() if "redis_version" in line
        )
        return {"version": "redis " + version.partition(":")[2].strip(), "resident": params.get("blocks", 0)}

    def info(self):
        return {"address": self.path}

    def connect(self):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(self.path)
        return self.command(b"PING") == b"PONG"

    def command(self, *words):
        self.socket.sendall(hiredis.pack_command(words))
        while True:
            self.reader.feed(self.socket.recv(1 << 20))
            reply = self.reader.gets()
            if reply is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
                return reply

    def load(self, blocks):
        self.keys = [self.rng.randbytes(32) for _ in range(blocks)]
        for at in range(0, blocks, 1000):
            words = [b"MSET"]
            for key in self.keys[at : at + 1000]:
                words += (key, b"8 bytes.")
            self.command(*words)
        value = bytes(GET_BLOCK_BYTES)
        for number in range(GET_BLOCKS):
            self.command(b"SET", b"get%d" % number, value)

    def op_lookup(self, params):
        groups = [tuple(self.rng.sample(self.keys, params["keys"])) for _ in range(params["groups"])]
        return Call(
            lambda i: self.expect(params["keys"], self.command(b"EXISTS", *groups[i % len(groups)])),
            before=lambda i: b"".join(groups[i % len(groups)]),  # who asks has just computed the keys
            note="one EXISTS, hiredis",
        )

    @staticmethod
    def expect(wanted, found):
        assert wanted == found, (wanted, found)

    def op_get(self, params):
        order = [b"get%d" % self.rng.randrange(GET_BLOCKS) for _ in range(GET_BLOCKS)]
        return Call(lambda i: memoryview(self.command(b"GET", order[i % GET_BLOCKS])), note="copies")

    def op_get_many(self, params):
        groups = [
            [b"get%d" % self.rng.randrange(GET_BLOCKS) for _ in range(params["blocks"])] for _ in range(256)
        ]
        return Call(lambda i: [memoryview(v) for v in self.command(b"MGET", *groups[i % 256])], note="copies")

    def op_create_many(self, params):
        used = next(
            int(line.partition(b":")[2])
            for line in self.command(b"INFO", b"memory").splitlines()
            if line.startswith(b"used_memory:")
        )
        self.command(b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru")
        self.command(b"CONFIG", b"SET", b"maxmemory", str(used))
        words = []

        def before(i):
            words[:] = [b"MSET"]
            for _ in range(params["blocks"]):
                words.extend((self.rng.randbytes(32), b"8 bytes."))

        return Call(
            lambda i: self.expect(b"OK", self.command(*words)), before, note="MSET of 8 B values, evicting"
        )

    def op_put(self, params):
        size, batch = params["bytes"], params["batch"]
        if size > 8 << 20:
            return "one 64 MiB value took seconds in trial runs"
        slots, source = max(1, params["cycle_bytes"] // (size * batch)), random.randbytes(size)

        def run(i):
            words = [b"MSET"]
            for j in range(batch):
                words += (b"put%d" % (i % slots * batch + j), source)
            self.expect(b"OK", self.command(*words))

        return Call(run, note="MSET")

    def close(self):
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        stop_server(self.server)
        self.server = None


if __name__ == "__main__":
    serve(Redis())
