"""Goal: whatever bytes arrive at the gRPC socket, the daemon answers with a status, within its bounds, and
serves others (invariants 7 to 9). Method: every method of every service called with random and mutated
bytes in place of its request, lists and sizes beyond their limits, and bytes that are no HTTP/2 at all.
"""

import os
import random
import socket

import grpc
import pytest
from google.protobuf import message_factory

from kvclient.testing.conformance.case import SMALL, new_keys
from kvstored.v1 import admin_pb2, store_pb2, transfer_pb2
from tests.conformance.grpc_door import GrpcClient
from tests.hostile.conftest import GROWTH_BYTES

CALL_S = 30.0
SERVICES = [
    service
    for module in (store_pb2, admin_pb2, transfer_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
# Drain would refuse the decent client its writes, by design.
METHODS = [
    method for service in SERVICES for method in service.methods if method.name not in ("Drain", "Events")
]


def channel_of(daemon) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{daemon.dir / 'grpc.sock'}", [("grpc.use_local_subchannel_pool", 1)])


def call(channel: grpc.Channel, method, payloads: list[bytes]) -> grpc.StatusCode:
    """Calls the method with raw bytes; the status it ends with."""
    kind = (
        ("stream" if method.client_streaming else "unary")
        + "_"
        + ("stream" if method.server_streaming else "unary")
    )
    path = f"/{method.containing_service.full_name}/{method.name}"
    invoke = getattr(channel, kind)(path, request_serializer=bytes, response_deserializer=bytes)
    try:
        answer = invoke(iter(payloads) if method.client_streaming else payloads[0], timeout=CALL_S)
        if method.server_streaming:
            for _ in answer:
                pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def value_of(choose: random.Random, field):
    """A plausible value for a field of that type."""
    if field.type == field.TYPE_BYTES:
        return choose.randbytes(32)
    if field.type == field.TYPE_STRING:
        return "default" if field.name == "namespace" else "1"
    if field.type == field.TYPE_BOOL:
        return bool(choose.randrange(2))
    return choose.choice([0, 1, 50, 1 << 16, (1 << 32) - 1])


def plausible(choose: random.Random, method) -> bytes:
    """A request of that method with most fields filled by their types."""
    message = message_factory.GetMessageClass(method.input_type)()
    for field in method.input_type.fields:
        if field.name == "timeout_ms":
            message.timeout_ms = 50
        elif field.is_repeated:
            getattr(message, field.name).extend(value_of(choose, field) for _ in range(choose.randrange(4)))
        elif choose.randrange(4):
            setattr(message, field.name, value_of(choose, field))
    return message.SerializeToString()


def mutate(choose: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.randrange(4)):
        at = choose.randrange(len(changed) + 1)
        if choose.randrange(3) == 0:
            changed[at:at] = choose.randbytes(choose.randrange(1, 20))
        elif at < len(changed):
            changed[at] = choose.randrange(256)
    return bytes(changed)


def fuzz(watched, rounds: int, seed: int) -> None:
    attacked = watched(
        args=("--lease-timeout-s", "1")
    )  # what a fuzzed create was granted ends with its lease
    choose = random.Random(seed)
    seen = set()
    with channel_of(attacked.daemon) as channel:
        for round_ in range(rounds):
            method = METHODS[round_ % len(METHODS)]
            good = plausible(choose, method)
            payload = (
                good
                if choose.randrange(4) == 0
                else mutate(choose, good)
                if choose.randrange(3)
                else choose.randbytes(choose.randrange(300))
            )
            status = call(channel, method, [payload, payload])
            seen.add(status)
            bad = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
            assert status not in bad, (
                f"{method.name} of {payload!r}: {status}, seed {seed}\n{attacked.daemon.log()[-2000:]}"
            )
            if method.name == "Flush":
                attacked.client.delete(attacked.kept)
                attacked.put(attacked.kept)
            if round_ % 200 == 199:
                attacked.serves()
    assert grpc.StatusCode.OK in seen and grpc.StatusCode.INVALID_ARGUMENT in seen
    attacked.survived()


def test_random_and_mutated_requests(watched):
    fuzz(watched, rounds=60 * len(METHODS), seed=5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_and_mutated_requests_for_long(watched):
    for seed in range(3):
        fuzz(watched, rounds=3000 * len(METHODS), seed=seed)


@pytest.mark.parametrize("method", ["Lookup", "Create", "Get", "Delete", "Touch"])
def test_lists_beyond_the_limit(watched, method):
    attacked = watched()
    with GrpcClient(str(attacked.daemon.dir / "grpc.sock")) as door:
        request = getattr(store_pb2, f"{method}Request")(keys=new_keys(1025))
        with pytest.raises(grpc.RpcError) as refused:
            answer = getattr(door.store, method)(request, timeout=CALL_S)
            list(answer) if method == "Get" else None
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "1025" in refused.value.details() and "1024" in refused.value.details().replace(",", "")
    attacked.survived()


def test_messages_beyond_the_limit(watched):
    attacked = watched()
    with GrpcClient(str(attacked.daemon.dir / "grpc.sock")) as door:
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as refused:
                door.store.RegisterLayout(store_pb2.RegisterLayoutRequest(blob=bytes(64 << 20)), timeout=30)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    attacked.survived(growth_bytes=GROWTH_BYTES + (64 << 20))  # a message's own size, once


def test_writes_outside_of_a_block(watched):
    attacked = watched()
    with GrpcClient(str(attacked.daemon.dir / "grpc.sock")) as door:
        keys = new_keys(1)
        layout = door.register_layout(SMALL.to_blob())
        answer = door.store.Create(store_pb2.CreateRequest(keys=keys, layout_id=layout), timeout=CALL_S)
        lease = answer.lease.id
        assert answer.results[0].length_bytes == SMALL.layers_length(16)
        length = SMALL.meta_offset(16) + SMALL.meta_length(16)  # the meta area behind may be written too
        for offset, data in (
            (length, b"x"),
            (length - 1, b"xx"),
            ((1 << 64) - 1, b"x"),
            ((1 << 64) - 1, b"xx"),
        ):
            piece = store_pb2.WriteRequest(lease_id=lease, key=keys[0], offset_bytes=offset, data=data)
            with pytest.raises(grpc.RpcError) as refused:
                door.store.Write(iter([piece]), timeout=CALL_S)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (offset, data)
        with pytest.raises(grpc.RpcError) as refused:
            piece = store_pb2.WriteRequest(lease_id=lease ^ 1, key=keys[0], data=b"x")
            door.store.Write(iter([piece]), timeout=CALL_S)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        door.store.Abort(store_pb2.AbortRequest(lease_id=lease), timeout=CALL_S)
    attacked.survived()


def test_bytes_that_are_no_http(watched):
    attacked = watched()
    for first in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        for size in (1, 9, 1000, 100_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
                wire.settimeout(CALL_S)
                wire.connect(str(attacked.daemon.dir / "grpc.sock"))
                try:
                    wire.sendall(first + os.urandom(size))
                    wire.shutdown(socket.SHUT_WR)
                    while wire.recv(65536):
                        pass
                except (BrokenPipeError, ConnectionResetError):
                    pass
    attacked.survived()


def test_there_is_something_to_attack():
    assert len(METHODS) >= 20
