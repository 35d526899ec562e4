"""vineyard 0.24.2: vineyardd with local metadata on a Unix socket, its memory reserved beforehand.

It evicts nothing, so a full store refuses: what a bulk operation replaces is deleted outside the timed
part.
"""

import random
import time
from pathlib import Path

import numpy as np
import vineyard

from bench.peers.contract import Call, serve, start_server, stop_server, wait_until

GET_BLOCK_BYTES = 4096
LOAD_BATCH = 250


class Vineyard:
    def __init__(self):
        self.server = self.client = None

    def setup(self, params):
        self.path = params.get("address") or str(Path(params["dir"]) / "vineyard.sock")
        if "address" not in params:
            size = params["pool_bytes"]
            daemon = Path(vineyard.__file__).parent / "bdist" / "vineyardd"
            self.server = start_server(
                [
                    str(daemon),
                    f"--socket={self.path}",
                    f"--size={size}",
                    "--meta=local",
                    "--rpc=false",
                    "--reserve_memory=true",
                ],
                Path(params["dir"]) / "vineyard.log",
            )
            self.server_pid = self.server.pid
        wait_until(self.connect, "vineyardd")
        self.rng = random.Random(7)
        self.ids, self.bulk_ids = params.get("ids", []), params.get("bulk_ids", [])
        self.ring = []
        if "address" not in params:
            self.wait_reserved(params["pool_bytes"])
            if params["dataset"] == "index":
                self.load(min(params["blocks"], params.get("vineyard_blocks", 20_000)))
        return {"version": "vineyard " + vineyard.__version__, "resident": len(self.ids)}

    def connect(self):
        self.session = vineyard.connect(self.path)
        self.client = self.session.ipc_client
        return True

    def wait_reserved(self, size):
        """The daemon faults its memory in behind its start: wait until it stopped growing."""
        smaps, deadline, last = Path(f"/proc/{self.server.pid}/smaps_rollup"), time.monotonic() + 15, -1

        def resident():
            return next(
                int(line.split()[1]) for line in smaps.read_text().splitlines() if line.startswith("Rss:")
            )

        while time.monotonic() < deadline and resident() != last:
            last = resident()
            time.sleep(0.3)

    def load(self, blocks):
        for _ in range(0, blocks, LOAD_BATCH):
            builders = self.client.create_blob([GET_BLOCK_BYTES] * LOAD_BATCH)
            self.ids += [builder.seal(self.session).id for builder in builders]

    def object_ids(self, count):
        ids = [vineyard.ObjectID(i) if isinstance(i, str) else i for i in self.ids]
        return [self.rng.choice(ids) for _ in range(count)]

    def op_lookup(self, params):
        groups = [self.rng.sample(self.ids, params["keys"]) for _ in range(512)]

        def run(i):
            exists = self.client.exists
            for key in groups[i % 512]:
                assert exists(key)

        return Call(run, note=f"64 calls, {len(self.ids):,} resident")

    def op_get(self, params):
        order, get = self.object_ids(4096), self.client.get_blob
        return Call(lambda i: memoryview(get(order[i % 4096])), note="no copy")

    def op_get_many(self, params):
        groups, get = [self.object_ids(params["blocks"]) for _ in range(256)], self.client.get_blobs
        return Call(lambda i: [memoryview(blob) for blob in get(groups[i % 256])], note="no copy")

    def op_create_many(self, params):
        live, sizes = [], [GET_BLOCK_BYTES] * params["blocks"]

        def run(i):
            live.extend(builder.seal(self.session).id for builder in self.client.create_blob(sizes))

        def after(i):
            self.client.delete(live)
            live.clear()

        return Call(run, after=after, note="no eviction, pool not full")

    def op_put(self, params):
        size, batch = params["bytes"], params["batch"]
        slots = max(1, params["cycle_bytes"] // (size * batch))
        source = np.frombuffer(random.randbytes(size), dtype=np.uint8)
        self.drop_bulk()
        self.ring = ring = [None] * slots

        def before(i):
            if ring[i % slots] is not None:
                self.client.delete(ring[i % slots])

        def run(i):
            builders = (
                self.client.create_blob([size] * batch) if batch > 1 else [self.client.create_blob(size)]
            )
            for builder in builders:
                np.copyto(np.frombuffer(builder, dtype=np.uint8), source)
            ring[i % slots] = [builder.seal(self.session).id for builder in builders]

        return Call(run, before)

    def drop_bulk(self):
        for ids in self.ring:
            if ids:
                self.client.delete(ids)
        self.ring = []

    def op_publish(self, params):
        """Fill the store once for `pass`; not measured, its ids go to the reading clients."""
        source = np.frombuffer(random.randbytes(params["bytes"]), dtype=np.uint8)
        self.drop_bulk()

        def run(i):
            builder = self.client.create_blob(params["bytes"])
            np.copyto(np.frombuffer(builder, dtype=np.uint8), source)
            self.ring.append([builder.seal(self.session).id])

        return Call(run)

    def info(self):
        """What a second client needs to find the blocks."""
        bulk = [key for ids in self.ring if ids for key in ids]
        return {
            "address": self.path,
            "ids": [repr(key) for key in self.ids[:4096]],
            "bulk_ids": [repr(key) for key in bulk],
        }

    def op_pass(self, params):
        ids = [vineyard.ObjectID(key) for key in self.bulk_ids]
        target = np.empty(params["bytes"], dtype=np.uint8)
        target[:] = 0
        return Call(
            lambda i: np.copyto(
                target, np.frombuffer(self.client.get_blob(ids[i % len(ids)]), dtype=np.uint8)
            )
        )

    def close(self):
        if self.client is not None:
            self.drop_bulk()
            self.session.close()
            self.client = None
        stop_server(self.server)
        self.server = None


if __name__ == "__main__":
    serve(Vineyard())
