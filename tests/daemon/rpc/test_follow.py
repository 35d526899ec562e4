"""Following blocks through gRPC, layer by layer.

Method: writer and follower are two calls of one test; nothing waits for a guessed time.
"""

import struct

import grpc
import pytest

from kvstored.v1 import admin_pb2, block_pb2, store_pb2
from tests.daemon.grpc_calls import CALL_S, INVALID, LAYER_BYTES, LAYERS, UNKNOWN, content, key, refused


def test_a_follower_gets_each_layer_as_it_is_published(calls):
    lease = calls.create([key("a")]).lease.id
    stream = calls.follow("a")
    first = next(stream)
    assert (
        first.num_layers == LAYERS and first.block.state == block_pb2.BLOCK_STATE_CREATED and not first.data
    )
    for layer in range(LAYERS - 1):
        data = content("a")[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]
        calls.write(lease, key("a"), data, layer * LAYER_BYTES)
        calls.mark_layer(lease, "a", layer + 1)
        got = next(stream)
        assert (got.layer, got.offset_bytes, got.layer_length_bytes) == (layer, 0, LAYER_BYTES)
        assert got.data == data
    last = content("a")[-LAYER_BYTES:]
    calls.write(lease, key("a"), last, (LAYERS - 1) * LAYER_BYTES)
    calls.seal(lease)
    assert [message.data for message in stream] == [last]


def test_a_sealed_block_is_followed_at_once_and_from_any_layer(calls):
    calls.put("a")
    assert b"".join(message.data for message in calls.follow("a")) == content("a")
    assert (
        b"".join(message.data for message in calls.follow("a", first_layer=2))
        == content("a")[2 * LAYER_BYTES :]
    )
    assert [message.data for message in calls.follow("a", first_layer=LAYERS)] == [b""]
    refused(lambda: calls.follow("a", first_layer=LAYERS + 1), INVALID, str(LAYERS + 1))


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_follower_learns_that_its_writer_gave_up(calls, how):
    lease = calls.create([key("a")], lease_ttl_ms=60_000 if how == "abort" else 3_000).lease.id
    stream = calls.follow("a")
    next(stream)
    if how == "abort":
        calls.store.Abort(store_pb2.AbortRequest(lease_id=lease), timeout=CALL_S)
    refused(lambda: stream, grpc.StatusCode.ABORTED)


def test_a_follower_waits_no_longer_than_it_said(calls):
    calls.create([key("a")])
    refused(lambda: calls.follow("a", timeout_ms=50), grpc.StatusCode.DEADLINE_EXCEEDED, "layer 0")
    refused(lambda: calls.follow("missing"), UNKNOWN)


def test_followers_are_bounded_and_do_not_hold_up_others(calls):
    calls.create([key("a")], lease_ttl_ms=60_000)
    streams = [calls.follow("a") for _ in range(64)]
    for stream in streams:
        next(stream)
    refused(lambda: calls.follow("a"), grpc.StatusCode.RESOURCE_EXHAUSTED, "limit is 64")
    calls.put("b")
    assert calls.get("b") == [content("b")]
    for stream in streams:
        stream.cancel()


def test_layers_of_different_lengths_are_padded_alike_on_both_sides(calls):
    """The daemon's Python half and its native half read the layout for themselves."""
    per_token = (100, 1, 512, 513, 7)
    blob = struct.pack("<4s9I5I", b"KVL1", 5, 2, 1, 1, 0, 16, 0, 10, 4, *per_token)
    for tokens in (1, 3, 16):
        created = calls.create([key(tokens)], layout_id=calls.register(blob).layout_id, token_counts=[tokens])
        result = created.results[0]
        block = calls.admin.Describe(admin_pb2.DescribeRequest(key=key(tokens)), timeout=CALL_S).block
        assert result.length_bytes == block.length_bytes
        assert result.writable_bytes == result.length_bytes + 512 + 10 + 4 * tokens
        data = content(tokens, result.length_bytes)
        calls.write(created.lease.id, key(tokens), data)
        refused(
            lambda r=result, c=created, t=tokens: calls.write(c.lease.id, key(t), b"x", r.writable_bytes),
            INVALID,
        )
        calls.seal(created.lease.id)
        at = 0
        layers = [message for message in calls.follow(tokens) if message.data]
        for layer, (message, size) in enumerate(zip(layers, per_token, strict=True)):
            assert message.layer == layer and message.data == data[at : at + size * tokens]
            at += -(-size * tokens // 512) * 512
        assert at == result.length_bytes
