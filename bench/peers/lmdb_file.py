"""LMDB in this process: a memory-mapped file on tmpfs, no sync, write map. The cheapest get there is.

It has no daemon and evicts nothing; readers in other processes share the file.
"""

import random
from pathlib import Path

import lmdb

from bench.peers.contract import Call, serve

GET_BLOCK_BYTES = 4096
GET_BLOCKS = 4096


class Lmdb:
    def __init__(self):
        self.env = None

    def setup(self, params):
        self.path = params.get("address") or str(Path(params["shm_dir"]) / "lmdb")
        self.env = lmdb.open(
            self.path,
            map_size=params["map_bytes"],
            writemap=True,
            sync=False,
            metasync=False,
            map_async=True,
            lock=True,
            max_readers=64,
        )
        self.rng = random.Random(7)
        if "address" not in params and params["dataset"] == "index":
            self.load(params["blocks"])
        return {"version": "lmdb " + ".".join(map(str, lmdb.version())), "resident": params.get("blocks", 0)}

    def info(self):
        return {"address": self.path}

    def load(self, blocks):
        self.keys = [self.rng.randbytes(32) for _ in range(blocks)]
        with self.env.begin(write=True) as txn:
            for key in sorted(self.keys):
                txn.put(key, b"8 bytes.")
            value = bytes(GET_BLOCK_BYTES)
            for number in range(GET_BLOCKS):
                txn.put(b"get%d" % number, value)

    def op_lookup(self, params):
        groups = [self.rng.sample(self.keys, params["keys"]) for _ in range(params["groups"])]

        def run(i):
            with self.env.begin(buffers=True) as txn:
                cursor = txn.cursor()
                found = sum(map(cursor.set_key, groups[i % len(groups)]))
            assert found == params["keys"]

        # Who asks has just computed the keys.
        return Call(run, before=lambda i: b"".join(groups[i % len(groups)]), note="in process")

    def op_get(self, params):
        order = [b"get%d" % self.rng.randrange(GET_BLOCKS) for _ in range(GET_BLOCKS)]

        def run(i):
            with self.env.begin(buffers=True) as txn:
                return len(txn.get(order[i % GET_BLOCKS])) and None

        return Call(run, note="in process")

    def op_get_many(self, params):
        groups = [
            [b"get%d" % self.rng.randrange(GET_BLOCKS) for _ in range(params["blocks"])] for _ in range(256)
        ]

        def run(i):
            with self.env.begin(buffers=True) as txn:
                views = [txn.get(key) for key in groups[i % 256]]
            assert len(views) == params["blocks"]

        return Call(run, note="in process")

    def op_create_many(self, params):
        batch = []

        def before(i):
            batch[:] = [(self.rng.randbytes(32), b"8 bytes.") for _ in range(params["blocks"])]

        def run(i):
            with self.env.begin(write=True) as txn:
                for key, value in batch:
                    txn.put(key, value)

        return Call(run, before, note="in process, no eviction, 8 B values")

    def op_put(self, params):
        size, batch = params["bytes"], params["batch"]
        slots, source = max(1, params["cycle_bytes"] // (size * batch)), random.randbytes(size)

        def run(i):
            with self.env.begin(write=True) as txn:
                for j in range(batch):
                    txn.put(b"put%d.%d.%d" % (size, batch, i % slots * batch + j), source)

        self.drop_bulk()
        return Call(run, note="in process")

    def drop_bulk(self):
        with self.env.begin(write=True) as txn:
            for key in list(txn.cursor().iternext(values=False)):
                txn.delete(key)

    def op_publish(self, params):
        return self.op_put({**params, "batch": 1, "cycle_bytes": params["blocks"] * params["bytes"]})

    def op_pass(self, params):
        """Copy `blocks` blocks of `bytes` out of the store, each into the same private buffer."""
        size, target = params["bytes"], bytearray(params["bytes"])

        def run(i):
            with self.env.begin(buffers=True) as txn:
                target[:] = txn.get(b"put%d.1.%d" % (size, i % params["blocks"]))

        return Call(run, note="in process")

    def close(self):
        if self.env is not None:
            self.env.close()
            self.env = None


if __name__ == "__main__":
    serve(Lmdb())
