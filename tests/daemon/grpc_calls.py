"""A daemon's gRPC services in one object, and the few calls that every test of them makes."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from kvstored.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

CALL_S = 20.0
LAYERS, TOKENS, LAYER_BYTES_PER_TOKEN = 4, 16, 512
LAYER_BYTES = LAYER_BYTES_PER_TOKEN * TOKENS
BLOCK_BYTES = LAYERS * LAYER_BYTES
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN = grpc.StatusCode.NOT_FOUND
GRANTED, EXISTS, PENDING, NO_SPACE = 1, 2, 3, 4  # CreateResult.Status
OK, NOT_HELD, STALE = 1, 2, 3  # EndResult.Status


def layout_blob(layers: int = LAYERS, tokens: int = TOKENS, per_token: int = LAYER_BYTES_PER_TOKEN) -> bytes:
    """A layout of uint8, one head (docs/formats.md)."""
    head = struct.pack("<4s9I", b"KVL1", layers, 2, 1, per_token // 2, 0, tokens, 0, 0, 0)
    return head + struct.pack(f"<{layers}I", *[per_token] * layers)


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def content(name: object, length: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(str(name).encode()).digest(length)


class Calls:
    """Owns the channel; close() it, or use as a context manager."""

    def __init__(self, directory: Any, namespace: str = "") -> None:
        self.directory = Path(directory)
        self.namespace = namespace
        self.channel = grpc.insecure_channel(f"unix:{directory}/grpc.sock")
        self.store = store_pb2_grpc.StoreStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.transfer = transfer_pb2_grpc.TransferStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def layout(self, **shape: int) -> int:
        request = store_pb2.RegisterLayoutRequest(namespace=self.namespace, blob=layout_blob(**shape))
        return self.store.RegisterLayout(request, timeout=CALL_S).layout_id

    def create(self, keys: list[bytes], **options: Any) -> Any:
        layout_id = options.pop("layout_id", None)
        request = store_pb2.CreateRequest(
            namespace=self.namespace,
            keys=keys,
            layout_id=self.layout() if layout_id is None else layout_id,
            **options,
        )
        return self.store.Create(request, timeout=CALL_S)

    def write(self, lease: int, wanted: bytes, data: bytes, offset: int = 0) -> int:
        request = store_pb2.WriteRequest(
            namespace=self.namespace, lease_id=lease, key=wanted, offset_bytes=offset, data=data
        )
        return self.store.Write(iter([request]), timeout=CALL_S).written_bytes

    def seal(self, lease: int, keys: tuple[bytes, ...] = (), zero_rest: bool = False) -> list[int]:
        request = store_pb2.SealRequest(
            namespace=self.namespace, lease_id=lease, keys=keys, zero_rest=zero_rest
        )
        return [result.status for result in self.store.Seal(request, timeout=CALL_S).results]

    def put(self, *names: object) -> None:
        """Creates, writes and seals a block per name."""
        created = self.create([key(name) for name in names])
        for name, result in zip(names, created.results, strict=True):
            assert result.status == store_pb2.CreateResult.STATUS_GRANTED, (name, result)
            self.write(created.lease.id, key(name), content(name))
        assert set(self.seal(created.lease.id)) == {store_pb2.EndResult.STATUS_OK}

    def get(self, *names: object, chunk_bytes: int = 0) -> list[bytes | None]:
        """The bytes per name, None for a miss."""
        request = store_pb2.GetRequest(
            namespace=self.namespace, keys=[key(name) for name in names], chunk_bytes=chunk_bytes
        )
        parts: list[list[bytes]] = [[] for _ in names]
        found = [False] * len(names)
        for message in self.store.Get(request, timeout=CALL_S):
            assert message.offset_bytes == sum(map(len, parts[message.index])), "a hole"
            parts[message.index].append(message.data)
            found[message.index] = message.found and not message.lost
        return [b"".join(part) if there else None for part, there in zip(parts, found, strict=True)]

    def states(self, *names: object) -> list[int]:
        request = store_pb2.LookupRequest(namespace=self.namespace, keys=[key(name) for name in names])
        return list(self.store.Lookup(request, timeout=CALL_S).states)

    def mark_layer(self, lease: int, name: object, layers: int) -> Any:
        request = store_pb2.MarkLayerRequest(
            namespace=self.namespace, lease_id=lease, key=key(name), layers=layers
        )
        return self.store.MarkLayer(request, timeout=CALL_S)

    def register(self, blob: bytes) -> Any:
        request = store_pb2.RegisterLayoutRequest(namespace=self.namespace, blob=blob)
        return self.store.RegisterLayout(request, timeout=CALL_S)

    def follow(self, name: object, **options: int) -> Any:
        request = transfer_pb2.FollowRequest(namespace=self.namespace, key=key(name), **options)
        return self.transfer.Follow(request, timeout=CALL_S)

    def stats(self) -> dict[str, int]:
        request = admin_pb2.StatsRequest(namespace=self.namespace)
        return dict(self.admin.Stats(request, timeout=CALL_S).namespaces[0].counters)

    def page(self, **fields: Any) -> Any:
        request = admin_pb2.ListRequest(namespace=self.namespace, **fields)
        return self.admin.List(request, timeout=CALL_S)

    def drain(self, on: bool, wait_ms: int = 0) -> Any:
        return self.admin.Drain(admin_pb2.DrainRequest(on=on, wait_ms=wait_ms), timeout=CALL_S)

    def scrub(self) -> list[Any]:
        return list(self.admin.Scrub(admin_pb2.ScrubRequest(namespace=self.namespace), timeout=CALL_S))

    def corrupt(self, name: object) -> None:
        """Changes one byte of a sealed block behind the daemon's back."""
        (prefix,) = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (self.directory / "state.json").read_text()))
        path = Path("/dev/shm") / f"{prefix}.pool"
        at = path.read_bytes().index(content(name)[:4096])
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, bytes([content(name)[5] ^ 1]), at + 5)
        os.close(fd)


def refused(call: Any, code: grpc.StatusCode, *words: str) -> None:
    """The call must fail with this status and a text that has these words."""
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        assert error.code() is code, f"{error.code()}: {error.details()}"
        for word in words:
            assert word in error.details(), error.details()
        return
    raise AssertionError(f"the call was not refused with {code}")
