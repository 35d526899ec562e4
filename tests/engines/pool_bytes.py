"""Damage to a sealed block behind everybody's back, as faulty memory does it."""

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


def first_block_bytes(kvstored):
    """Some bytes of a block that lies in the pool."""
    from kvstored.v1 import admin_pb2
    from tests.conformance.grpc_door import GrpcClient

    with GrpcClient(str(kvstored.dir / "grpc.sock")) as door:
        name = door.admin.List(admin_pb2.ListRequest()).blocks[0].key
    with kvstored.connect().get([bytes(name)]) as blocks:
        return blocks[0].layer(0).tobytes()[:64]
