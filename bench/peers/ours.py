"""kvstored and kvclient as a contender: a daemon in its own process, the public client API in this one.

Blocks of the index data set are written in a shuffled order, so that the records of one prompt do not lie
side by side.
"""

import sys
import time
from pathlib import Path

import numpy as np

import kvclient
from bench.peers.contract import Call, serve, start_server, stop_server, wait_until

IDENTITY = bytes(range(32))
CHUNK_TOKENS = 16
PROMPT_CHUNKS = 128
GET_BLOCKS = 4096
LOAD_BATCH = 512
MIB = 1 << 20
TURNOVERS = 10
PROBED = 16  # destinations in a row that must differ


def prompt(number: int, chunks: int, kind: int = 0) -> "kvclient.Chain":
    """The chain of a prompt, alike in every process; nothing of it is shared with another number's."""
    tokens = np.zeros(chunks * CHUNK_TOKENS, dtype=np.int32)
    tokens[0], tokens[1] = number, kind
    return kvclient.chain(IDENTITY, tokens, block_tokens=CHUNK_TOKENS)


def layout_of(size: int) -> "kvclient.Layout":
    """One layer of `size` bytes in a block of 16 tokens."""
    heads = max(1, size // MIB) * 16
    return kvclient.Layout(
        num_layers=1,
        num_kv_heads=heads,
        head_dim=size // (2 * CHUNK_TOKENS * heads),
        dtype="uint8",
        block_tokens=CHUNK_TOKENS,
        meta_fixed=0,
        meta_per_token=0,
    )


class Ours:
    def __init__(self):
        self.server = self.client = None
        self.fresh, self.filled = 0, []

    def setup(self, params):
        self.dir = params.get("address") or str(Path(params["dir"]) / "kv")
        if "address" not in params:
            Path(self.dir).mkdir(mode=0o700)
            self.server = self.start(params)
            self.server_pid = self.server.pid
        self.client = wait_until(lambda: kvclient.connect(self.dir), "kvstored")
        self.attached = time.monotonic()
        self.rng = np.random.default_rng(7)
        self.small = self.client.register_layout(layout_of(3072))  # with its checksum: an extent of 4 KiB
        if "address" not in params:
            wait_until(
                lambda: self.client.stats()["faulted_bytes"] >= 0.95 * params["pool_bytes"], "the pool", 60
            )
        blocks = params.get("blocks", 0)
        if blocks and "address" not in params:
            self.load(blocks)
        elif "address" in params:
            self.prompts = [prompt(number, PROMPT_CHUNKS) for number in range(GET_BLOCKS // PROMPT_CHUNKS)]
        return {"version": "kvstored, this checkout", "resident": blocks}

    def start(self, params):
        """The daemon, with its memory in the run's own directory: what a killed run leaves goes with that."""
        pool = Path(params["shm_dir"]) / "pool"
        pool.mkdir(mode=0o700)
        options = {
            "--dir": self.dir,
            "--memory": str(params["pool_bytes"]),
            "--max-blocks": str(params["max_blocks"]),
            "--pool-dir": str(pool),
        }
        command = [sys.executable, "-m", "kvstored", "serve", "--discard", *sum(options.items(), ())]
        return start_server(command, Path(params["dir"]) / "kvstored.log")

    def info(self):
        return {"address": self.dir}

    def load(self, blocks):
        self.prompts = [prompt(number, PROMPT_CHUNKS) for number in range(blocks // PROMPT_CHUNKS)]
        keys = [key for chain in self.prompts for key in chain.keys]
        order = self.rng.permutation(len(keys))
        for at in range(0, len(order), LOAD_BATCH):
            with self.client.create([keys[i] for i in order[at : at + LOAD_BATCH]], self.small) as writer:
                if len(writer.granted) != len(writer.results):
                    raise RuntimeError(
                        f"only {len(writer.granted)} of {len(writer.results)} granted at block {at}"
                    )
                writer.seal(zero_rest=True)

    def op_lookup(self, params):
        count = params["keys"]
        halves = [chain[at : at + count] for chain in self.prompts for at in range(0, PROMPT_CHUNKS, count)]
        chains = [halves[i] for i in self.rng.permutation(len(halves))[: params["groups"]]]
        lookup, groups = self.client.lookup, len(chains)
        first = lookup(chains[0])
        assert first.resident == count, first

        def before(i):
            chains[i % groups].packed_keys  # noqa: B018  (a chain has just been computed when it is looked up)

        def run(i):
            return lookup(chains[i % groups]).resident == count

        return Call(run, before, note=f"{len(halves) * count:,} resident")

    def op_get(self, params):
        picks = self.rng.integers(0, GET_BLOCKS, GET_BLOCKS)
        order = [
            self.prompts[n // PROMPT_CHUNKS][n % PROMPT_CHUNKS : n % PROMPT_CHUNKS + 1]
            for n in map(int, picks)
        ]
        get = self.client.get
        with get(order[0]) as blocks:
            assert len(blocks[0].view) == 3072

        def run(i):
            with get(order[i % GET_BLOCKS]) as blocks:
                blocks[0].view  # noqa: B018  (making the view is what is measured)

        return Call(run, note="no copy")

    def op_get_again(self, params):
        chain, get = self.prompts[0][:1], self.client.get

        def run(i):
            with get(chain) as blocks:
                blocks[0].view  # noqa: B018

        return Call(run, note="no copy")

    def many(self, params):
        return [chain[: params["blocks"]] for chain in self.prompts[: GET_BLOCKS // PROMPT_CHUNKS]]

    def op_get_many(self, params):
        chains, get = self.many(params), self.client.get

        def run(i):
            with get(chains[i % len(chains)]):
                pass

        return Call(run, note="no copy")

    def op_get_many_views(self, params):
        chains, get = self.many(params), self.client.get

        def run(i):
            with get(chains[i % len(chains)]) as blocks:
                for block in blocks:
                    block.view  # noqa: B018

        return Call(run, note="no copy")

    def new_chain(self, chunks):
        self.fresh += 1
        return prompt(self.fresh, chunks, kind=1 + time.monotonic_ns() % (1 << 30))

    def filled_chain(self, chunks):
        """One that refill deletes. (Not for short calls: a process that keeps growing takes page faults.)"""
        self.filled.append(self.new_chain(chunks))
        return self.filled[-1]

    def op_create_many(self, params):
        # In the steady state: a pool has been full for long where it counts.
        while self.client.stats()["evictions"] < TURNOVERS * self.client.stats()["blocks"]:
            for _ in range(1000):
                with self.client.create(self.new_chain(64), self.small) as writer:
                    writer.seal(zero_rest=True)
        create, chain = self.client.create, None

        def before(i):
            nonlocal chain
            chain = self.new_chain(params["blocks"])

        def run(i):
            with create(chain, self.small) as writer:
                writer.seal(zero_rest=True)

        return Call(run, before, note=f"evicting 64 each time, pool turned over {TURNOVERS} times")

    def put(self, params, fill, shape=-1):
        layout, batch = self.client.register_layout(layout_of(params["bytes"])), params["batch"]
        source = self.rng.integers(0, 256, params["bytes"], dtype=np.uint8).reshape(shape)
        create, clock, chain = self.client.create, time.perf_counter_ns, None

        def before(i):
            nonlocal chain
            chain = self.filled_chain(batch)

        def run(i):
            with create(chain, layout) as writer:
                start = clock()
                for j in range(batch):
                    fill(writer[j], source)
                return clock() - start

        note = self.refill(layout)
        return Call(run, before, note=note)

    def refill(self, layout):
        """A pool full of empty blocks of this layout; says so if its destinations do not go round."""
        keys = [key for chain in self.filled for key in chain.keys]
        for at in range(0, len(keys), LOAD_BATCH):
            self.client.delete(keys[at : at + LOAD_BATCH])
        self.filled, evictions, seen = [], self.client.stats()["evictions"], set()
        for more in (False, True):
            while len(seen) < PROBED if more else self.client.stats()["evictions"] == evictions:
                with self.client.create(self.filled_chain(1), layout) as writer:
                    address = writer[0].layer(0).ctypes.data
                if more and address in seen:
                    return f"a destination came back after {len(seen)} puts"
                if more:
                    seen.add(address)
        return ""

    def op_put_numpy(self, params):
        layout = layout_of(params["bytes"])
        shape = (2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)

        def fill(block, source):
            block.layer(0)[...] = source

        return self.put(params, fill, shape)

    def op_put_copy_into(self, params):
        copy_into = kvclient.copy_into

        def fill(block, source):
            copy_into(block.view, source)

        return self.put(params, fill)

    def op_put_copy_from(self, params):
        """Like copy_into, and the block keeps the checksum."""
        return self.put(params, lambda block, source: block.copy_from(source))

    def op_publish(self, params):
        layout = self.client.register_layout(layout_of(params["bytes"]))
        source = self.rng.integers(0, 256, params["bytes"], dtype=np.uint8)

        def run(i):
            with self.client.create(prompt(i, 1, kind=-1), layout) as writer:
                kvclient.copy_into(writer[0].view, source)

        return Call(run)

    def op_pass(self, params):
        chains = [prompt(number, 1, kind=-1) for number in range(params["blocks"])]
        target, get = np.zeros(params["bytes"], dtype=np.uint8), self.client.get

        def run(i):
            with get(chains[i % len(chains)]) as blocks:
                target[:] = np.frombuffer(blocks[0].view, dtype=np.uint8)

        return Call(run, note=f"{(time.monotonic() - self.attached) * 1e3:.0f} ms after it attached")

    def close(self):
        if self.client is not None:
            self.client.close()
            self.client = None
        stop_server(self.server)
        self.server = None


if __name__ == "__main__":
    serve(Ours())
