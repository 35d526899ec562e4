"""Damage to a sealed block behind everybody's back, as faulty memory does it; a pool without room."""

import os
import re
from pathlib import Path


def flip_in_pool(directory: Path, content: bytes) -> None:
    """Changes one byte of where the content lies in the pool of that daemon."""
    (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (directory / "state.json").read_text()))
    path = Path("/dev/shm") / f"{prefix}.pool"
    at = path.read_bytes().index(content)
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([content[5] ^ 1]), at + 5)
    finally:
        os.close(fd)


def take_all(client):
    """The writers of blocks that are never sealed, and leave no room for another until they are let go."""
    from kvclient.blocks.layout import Layout

    writers = []
    for size in (1 << power for power in range(24, 4, -1)):  # also what is left of another's slab
        layout = Layout(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", kv_per_layer=1, block_tokens=16,
            meta_fixed=0, meta_per_token=0, layer_bytes_per_token=(size // 16,), name="all",
        )  # fmt: skip
        layout_id = client.register_layout(layout)
        while (writer := client.create([os.urandom(32) for _ in range(16)], layout_id)).granted:
            writers.append(writer)
    return writers


def names_in(kvstored):
    """The keys of all blocks that it has."""
    from kvstored.v1 import admin_pb2
    from tests.conformance.grpc_door import GrpcClient

    with GrpcClient(str(kvstored.dir / "grpc.sock")) as door:
        return [bytes(block.key) for block in door.admin.List(admin_pb2.ListRequest()).blocks]


def first_block_bytes(kvstored, but=()):
    """Some bytes of a block that lies in the pool, under none of those keys."""
    names = [name for name in names_in(kvstored) if name not in but]
    with kvstored.connect().get(names) as blocks:
        return next(block for block in blocks if block is not None).layer(0).tobytes()[:64]  # no mark
