"""Mooncake store over TCP with mooncake_master, one client that owns the segment, all on loopback.

Its keys are strings; the segment belongs to this process, so puts and gets are local copies and the master
answers the metadata questions. What a bulk operation replaces is removed outside the timed part.
"""

import random
import socket
import subprocess
from pathlib import Path

import mooncake
import numpy as np

from bench.peers.contract import Call, serve, start_server, stop_server, wait_until

GET_BLOCK_BYTES = 4096
GET_BLOCKS = 4096
LOAD_BATCH = 256


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Mooncake:
    def __init__(self):
        self.server: subprocess.Popen | None = None
        self.store = None

    def setup(self, params):
        self.address = params.get("address")
        if self.address is None:
            port = free_port()
            self.address = f"127.0.0.1:{port}"
            master = Path(mooncake.__file__).parent / "mooncake_master"
            self.server = start_server(
                [
                    str(master),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={free_port()}",
                    "--default_kv_lease_ttl=50",
                    "--minloglevel=2",
                ],
                Path(params["dir"]) / "mooncake.log",
            )
            self.server_pid = self.server.pid
            host, wait_port = "127.0.0.1", port
            wait_until(
                lambda: socket.create_connection((host, wait_port), 0.2).close() is None, "mooncake_master"
            )
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        owned = params["pool_bytes"] if "address" not in params else 0
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", owned, 64 << 20, "tcp", "", self.address)
        if code != 0:
            raise RuntimeError(f"MooncakeDistributedStore.setup answered {code}")
        self.rng = random.Random(7)
        if "address" not in params and params["dataset"] == "index":
            self.load(min(params["blocks"], params.get("mooncake_blocks", 100_000)))
        return {"version": "mooncake 0.3.13.post1, tcp", "resident": len(getattr(self, "keys", []))}

    def info(self):
        return {"address": self.address}

    def load(self, blocks):
        self.keys = [self.rng.randbytes(32).hex() for _ in range(blocks)]
        for at in range(0, blocks, LOAD_BATCH):
            keys = self.keys[at : at + LOAD_BATCH]
            code = self.store.put_batch(keys, [b"8 bytes."] * len(keys))
            if code != 0:
                raise RuntimeError(f"put_batch answered {code}")
        for at in range(0, GET_BLOCKS, LOAD_BATCH):
            keys = [f"get{number}" for number in range(at, at + LOAD_BATCH)]
            self.store.put_batch(keys, [bytes(GET_BLOCK_BYTES)] * len(keys))

    def op_lookup(self, params):
        groups = [self.rng.sample(self.keys, params["keys"]) for _ in range(min(2000, params["groups"]))]

        def run(i):
            assert sum(self.store.batch_is_exist(groups[i % len(groups)])) == params["keys"]

        # Who asks has just computed the keys.
        return Call(
            run, before=lambda i: "".join(groups[i % len(groups)]), note=f"{len(self.keys):,} resident"
        )

    def op_get(self, params):
        order = [f"get{self.rng.randrange(GET_BLOCKS)}" for _ in range(GET_BLOCKS)]

        def run(i):
            key = order[i % GET_BLOCKS]
            found = len(self.store.get(key)) or len(
                self.store.get(key)
            )  # on a busy machine a get may find nothing
            if found != GET_BLOCK_BYTES:
                raise RuntimeError(f"get answered {found} of {GET_BLOCK_BYTES} bytes")

        return Call(run, note="copies")

    def op_get_many(self, params):
        groups = [
            [f"get{n}" for n in self.rng.sample(range(GET_BLOCKS), params["blocks"])] for _ in range(256)
        ]

        def run(i):
            assert len(self.store.get_batch(groups[i % 256])) == params["blocks"]

        return Call(run, note="copies")

    def op_create_many(self, params):
        keys, values = [], [b"8 bytes."] * params["blocks"]

        def before(i):
            keys[:] = [self.rng.randbytes(32).hex() for _ in range(params["blocks"])]

        def run(i):
            assert self.store.put_batch(keys, values) == 0

        return Call(run, before, note="8 B values, pool not full")

    def op_put(self, params):
        size, batch = params["bytes"], params["batch"]
        slots = max(1, params["cycle_bytes"] // (size * batch))
        source = np.frombuffer(bytearray(random.randbytes(size)), dtype=np.uint8)
        if self.store.register_buffer(source.ctypes.data, source.nbytes) != 0:
            return "register_buffer refused the source"
        if self.server is not None:
            self.store.remove_all()
        pointers, sizes = [source.ctypes.data] * batch, [size] * batch

        def names(i):
            return [f"put{size}.{batch}.{i % slots * batch + j}" for j in range(batch)]

        def before(i):
            for name in names(i):
                self.store.remove(name, True)

        def run(i):
            assert source is not None
            codes = self.store.batch_put_from(names(i), pointers, sizes)
            assert not any(codes), codes[:4]

        return Call(run, before, note="put_from a registered buffer")

    def close(self):
        if self.store is not None:
            self.store.close()
            self.store = None
        stop_server(self.server)
        self.server = None


if __name__ == "__main__":
    serve(Mooncake())
