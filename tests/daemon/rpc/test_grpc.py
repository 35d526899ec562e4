"""Blocks through the gRPC door of a real daemon: meaning, bounds, statuses.

Method: each test has a daemon of its own; when it ends the store must still be consistent.
"""

import grpc
import pytest

from kvstored.v1 import admin_pb2, block_pb2, store_pb2, transfer_pb2
from tests.daemon.grpc_calls import (
    CALL_S,
    EXISTS,
    GRANTED,
    INVALID,
    LAYERS,
    NO_SPACE,
    NOT_HELD,
    OK,
    PENDING,
    TOKENS,
    UNKNOWN,
    Calls,
    content,
    key,
    layout_blob,
    refused,
)

# ---- writing and reading


def test_what_was_sealed_is_read_back_byte_by_byte(calls):
    calls.put("a", "b", "c")
    assert calls.get("a", "missing", "c") == [content("a"), None, content("c")]
    assert calls.get("b", chunk_bytes=4096) == [content("b")]
    assert calls.states("a", "missing", "c") == [2, 0, 2]


def test_a_block_larger_than_a_message(calls):
    layout_id = calls.layout(layers=8, tokens=128, per_token=4096)
    data = content("big", 8 * 128 * 4096)
    created = calls.create([key("big")], layout_id=layout_id)
    assert created.results[0].length_bytes == len(data)
    request = [
        store_pb2.WriteRequest(
            lease_id=created.lease.id if at == 0 else 0,
            key=key("big") if at == 0 else b"",
            offset_bytes=at,
            data=data[at : at + (1 << 20)],
        )
        for at in range(0, len(data), 1 << 20)
    ]
    assert calls.store.Write(iter(request), timeout=CALL_S).written_bytes == len(data)
    calls.seal(created.lease.id)
    before = calls.stats()
    assert calls.get("big") == [data]
    assert calls.stats()["hits"] == before["hits"] + 1, "one get is one hit, however many pieces it takes"


def foul_the_pool(calls, layout_id: int, length: int) -> None:
    """What is free now had another prompt's bytes."""
    names = [f"foul {number}" for number in range(8)]
    created = calls.create([key(name) for name in names], layout_id=layout_id)
    for name, result in zip(names, created.results, strict=True):
        calls.write(created.lease.id, key(name), b"\xee" * result.writable_bytes)
    calls.seal(created.lease.id)
    keys = [key(name) for name in names]
    assert calls.store.Delete(store_pb2.DeleteRequest(keys=keys), timeout=CALL_S).count == 8


def test_a_block_with_bytes_nobody_wrote_is_not_sealed(calls):
    per_token, tokens = 33, 16  # a layer of 528 bytes, and 496 of padding
    layout_id = calls.layout(layers=3, tokens=tokens, per_token=per_token)
    foul_the_pool(calls, layout_id, 3 * 1024)
    layer = content("a", per_token * tokens)
    lease = calls.create([key("a"), key("b")], layout_id=layout_id).lease.id
    for number in (0, 2):
        calls.write(lease, key("a"), layer[:100], offset=1024 * number)
        calls.write(lease, key("a"), layer[100:], offset=1024 * number + 100)
    calls.write(lease, key("a"), layer[1:], offset=1024 + 1)  # all but one byte
    refused(lambda: calls.seal(lease, (key("a"),)), INVALID, "layers [1]", "zero_rest")
    refused(lambda: calls.seal(lease), INVALID, "layers [1]")
    calls.mark_layer(lease, "a", 1)
    refused(lambda: calls.mark_layer(lease, "a", 2), INVALID, "layers [1]")
    assert calls.states("a", "b") == [1, 1]
    calls.write(lease, key("a"), layer[:1], offset=1024)
    assert calls.seal(lease, (key("a"),)) == [OK]
    assert calls.get("a") == [(layer + bytes(1024 - len(layer))) * 3], "also the padding shows nothing"
    assert calls.seal(lease, zero_rest=True) == [OK]
    assert calls.get("b") == [bytes(3 * 1024)]


def test_an_unsealed_block_is_found_by_nobody(calls):
    created = calls.create([key("a")])
    calls.write(created.lease.id, key("a"), content("a"))
    assert calls.states("a") == [1] and calls.get("a") == [None]
    assert calls.seal(created.lease.id) == [OK]
    assert calls.states("a") == [2] and calls.get("a") == [content("a")]


def test_of_two_writers_one_is_granted_and_neither_batch_fails(calls):
    calls.put("there")
    first = calls.create([key("x"), key("there")])
    second = calls.create([key("there"), key("x"), key("y"), key("y")])
    assert [result.status for result in first.results] == [GRANTED, EXISTS]
    assert [result.status for result in second.results] == [EXISTS, PENDING, GRANTED, PENDING]
    assert first.lease.id != second.lease.id
    none = calls.create([key("there")])
    assert none.lease.id == 0


def test_abort_and_seal_answer_per_block(calls):
    lease = calls.create([key("a"), key("b"), key("c")]).lease.id
    for name in "abc":
        calls.write(lease, key(name), content(name))
    assert calls.seal(lease, (key("a"), key("unknown"), key("a"))) == [OK, NOT_HELD, OK]
    request = store_pb2.AbortRequest(lease_id=lease, keys=[key("b"), key("a")])
    ended = calls.store.Abort(request, timeout=CALL_S).results
    assert [result.status for result in ended] == [OK, NOT_HELD]
    assert calls.states("a", "b", "c") == [2, 0, 1]
    assert calls.seal(lease) == [OK]
    refused(lambda: calls.seal(lease), UNKNOWN, "lease")
    assert calls.states("a", "b", "c") == [2, 0, 2]


def test_a_short_block_and_its_options(calls):
    created = calls.create([key("s")], token_counts=[3], priority=90, ttl_ms=3_600_000)
    assert created.results[0].length_bytes == LAYERS * 3 * 512
    calls.write(created.lease.id, key("s"), content("s", LAYERS * 3 * 512))
    calls.seal(created.lease.id)
    block = calls.admin.Describe(admin_pb2.DescribeRequest(key=key("s")), timeout=CALL_S).block
    assert (block.state, block.token_count, block.priority) == (block_pb2.BLOCK_STATE_SEALED, 3, 90)
    assert (
        block.length_bytes == LAYERS * 3 * 512 and 3_590_000 <= block.ttl_ms <= 3_610_000 and block.created_ms
    )
    assert calls.get("s") == [content("s", LAYERS * 3 * 512)]


def test_a_lease_ends_at_its_deadline_and_its_blocks_with_it(calls, wait_until):
    created = calls.create([key("a")], lease_ttl_ms=100)
    wait_until(lambda: calls.states("a") == [0], "the block of the ended lease is gone")
    refused(lambda: calls.write(created.lease.id, key("a"), b"x"), UNKNOWN, "lease")
    refused(
        lambda: calls.store.KeepAlive(store_pb2.KeepAliveRequest(lease_id=created.lease.id), timeout=CALL_S),
        UNKNOWN,
    )
    assert calls.stats()["used_bytes"] == 0
    calls.put("a")


def test_a_lease_that_is_kept_alive_lives_on(calls, wait_until):
    kept, other = calls.create([key("a")], lease_ttl_ms=25_000), calls.create([key("b")], lease_ttl_ms=100)
    request = store_pb2.KeepAliveRequest(lease_id=kept.lease.id)
    assert 24_000 <= calls.store.KeepAlive(request, timeout=CALL_S).lease.remaining_ms <= 25_000
    wait_until(lambda: calls.states("b") == [0], "the other lease has ended")
    assert other.lease.id and calls.states("a") == [1]
    calls.write(kept.lease.id, key("a"), content("a"))
    assert calls.seal(kept.lease.id) == [OK]


def test_a_lease_longer_than_the_daemons_is_cut(calls):
    assert calls.create([key("a")], lease_ttl_ms=10**12).lease.remaining_ms <= 30_000


def test_many_more_blocks_than_the_pool_holds(calls):
    """The daemon evicts; a get is then a miss or the right bytes, never anything else."""
    layout_id = calls.layout(layers=8, tokens=128, per_token=4096)
    size = 8 * 128 * 4096
    for number in range(24):
        created = calls.create([key(number)], layout_id=layout_id)
        assert created.results[0].status == GRANTED
        for at in range(0, size, 1 << 20):
            data = content(number, size)[at : at + (1 << 20)]
            calls.write(created.lease.id, key(number), data, at)
        calls.seal(created.lease.id)
    got = calls.get(*range(24))
    assert got[-1] == content(23, size) and None in got
    assert all(data in (None, content(number, size)) for number, data in enumerate(got))
    assert calls.stats()["evictions"] >= 8


def test_a_pool_full_of_unsealed_blocks_answers_no_space_per_block(calls):
    layout_id = calls.layout(layers=8, tokens=128, per_token=16384)  # 16 MiB
    created = calls.create([key(number) for number in range(8)], layout_id=layout_id)
    statuses = [result.status for result in created.results]
    assert GRANTED in statuses and NO_SPACE in statuses
    calls.store.Abort(store_pb2.AbortRequest(lease_id=created.lease.id), timeout=CALL_S)
    assert calls.stats()["used_bytes"] == 0


# ---- bounds


@pytest.mark.parametrize("length", [0, 1, 31, 33, 1000])
def test_a_key_of_another_length_is_refused(calls, length):
    wrong = b"k" * length
    for call in (
        lambda: calls.store.Lookup(store_pb2.LookupRequest(keys=[key("a"), wrong]), timeout=CALL_S),
        lambda: calls.store.Delete(store_pb2.DeleteRequest(keys=[wrong]), timeout=CALL_S),
        lambda: calls.store.Touch(store_pb2.TouchRequest(keys=[wrong]), timeout=CALL_S),
        lambda: calls.store.Get(store_pb2.GetRequest(keys=[wrong]), timeout=CALL_S),
        lambda: calls.create([wrong]),
        lambda: calls.admin.Describe(admin_pb2.DescribeRequest(key=wrong), timeout=CALL_S),
        lambda: calls.transfer.Follow(transfer_pb2.FollowRequest(key=wrong), timeout=CALL_S),
    ):
        refused(call, INVALID, str(length), "32")


def test_a_message_holds_1024_keys_and_no_more(calls):
    keys = [key(number) for number in range(1025)]
    assert len(calls.store.Lookup(store_pb2.LookupRequest(keys=keys[:1024]), timeout=CALL_S).states) == 1024
    refused(
        lambda: calls.store.Lookup(store_pb2.LookupRequest(keys=keys), timeout=CALL_S),
        INVALID,
        "1025",
        "1024",
    )
    refused(lambda: calls.create(keys), INVALID, "1025", "1024")
    assert calls.stats()["blocks"] == calls.stats()["unsealed"] == 0
    created = calls.create(keys[:1024])
    assert {result.status for result in created.results} == {GRANTED}
    assert calls.seal(created.lease.id, zero_rest=True) == [OK] * 1024
    assert calls.store.Delete(store_pb2.DeleteRequest(keys=keys[:1024]), timeout=CALL_S).count == 1024


def test_wrong_arguments_are_refused_with_value_and_limit(calls):
    layout_id = calls.layout()
    lease = calls.create([key("a")]).lease.id
    names = (
        (lambda: calls.create([key("b")], priority=101), INVALID, "101", "100"),
        (lambda: calls.create([key("b")], token_counts=[1, 2]), INVALID, "2 token_counts", "1 keys"),
        (lambda: calls.create([key("b")], token_counts=[TOKENS + 1]), INVALID, str(TOKENS + 1), str(TOKENS)),
        (lambda: calls.create([key("b")], token_counts=[0]), INVALID),
        (lambda: calls.create([key("b")], layout_id=layout_id + 99), UNKNOWN, str(layout_id + 99)),
        (lambda: calls.create([key("b")], ttl_ms=2**64 - 1), INVALID, str(2**64 - 1)),
        (lambda: calls.write(lease, key("b"), b"x"), UNKNOWN),
        (lambda: calls.write(lease + 1, key("a"), b"x"), UNKNOWN, "lease"),
        (lambda: calls.write(lease, b"", b"x"), INVALID, "key"),
        (lambda: calls.write(lease, key("a"), b"x", 1 << 40), INVALID, str(1 << 40)),
        (lambda: calls.write(lease, key("a"), b"x", 2**64 - 1), INVALID, str(2**64 - 1)),
        (
            lambda: calls.write(lease, key("a"), bytes((1 << 20) + 1)),
            INVALID,
            str((1 << 20) + 1),
            str(1 << 20),
        ),
        (lambda: calls.mark_layer(lease, "a", LAYERS + 1), INVALID, str(LAYERS + 1), str(LAYERS)),
        (lambda: calls.mark_layer(lease, "b", 1), UNKNOWN),
        (lambda: calls.get("a", chunk_bytes=1), INVALID, "4096"),
        (lambda: calls.get("a", chunk_bytes=1 << 21), INVALID, str(1 << 21)),
        (lambda: calls.page(limit=1001), INVALID, "1001", "1000"),
        (lambda: calls.page(page_token="x"), INVALID, "'x'"),
        (lambda: calls.page(page_token="9" * 100), INVALID),
        (lambda: calls.page(key_prefix=bytes(33)), INVALID, "33", "32"),
        (lambda: calls.drain(True, 10**9), INVALID, str(10**9), "300000"),
        (lambda: calls.admin.Events(admin_pb2.EventsRequest(interval_ms=1), timeout=CALL_S), INVALID, "100"),
        (lambda: calls.register(b""), INVALID),
        (lambda: calls.register(b"KVL1"), INVALID),
        (lambda: calls.register(layout_blob().ljust(4093, b"x")), INVALID, "4093", "4088"),
        (lambda: calls.register(layout_blob(layers=2)[:-1]), INVALID),
    )
    for call, code, *words in names:
        refused(call, code, *words)
    calls.write(lease, key("a"), content("a"))
    assert calls.seal(lease) == [OK] and calls.get("a") == [content("a")], "the lease has survived all that"


def test_an_unknown_namespace_is_not_found(calls):
    with Calls(calls.daemon.dir, namespace="nobody") as other:
        refused(lambda: other.states("a"), UNKNOWN, "'nobody'")
        refused(other.layout, UNKNOWN, "'nobody'")


def test_an_unknown_namespace_of_any_length_is_not_found(calls):
    name = "x" * 100_000
    refused(lambda: Calls(calls.directory, name).layout(), UNKNOWN, f"'{name[:64]}'")
    refused(lambda: Calls(calls.directory, name).page(), UNKNOWN, f"'{name[:64]}'")


def test_a_message_over_the_limit_is_refused_and_the_daemon_goes_on(calls):
    request = store_pb2.WriteRequest(lease_id=1, key=key("a"), data=bytes(5 << 20))
    refused(lambda: calls.store.Write(iter([request]), timeout=CALL_S), grpc.StatusCode.RESOURCE_EXHAUSTED)
    calls.put("a")


def test_leases_are_bounded(daemon):
    kvstored = daemon(memory="64MiB", args=("--max-leases", "2"))
    with Calls(kvstored.dir) as calls:
        leases = [calls.create([key(number)]).lease.id for number in range(2)]
        refused(
            lambda: calls.create([key("x")]), grpc.StatusCode.RESOURCE_EXHAUSTED, "limit is 2", "max_leases"
        )
        assert calls.states("x") == [0]
        calls.store.Abort(store_pb2.AbortRequest(lease_id=leases[0]), timeout=CALL_S)
        calls.put("x")


def test_layouts_are_registered_once(calls):
    first, second = calls.layout(), calls.layout(layers=5)
    assert calls.layout() == first != second
    found = calls.store.ListLayouts(store_pb2.ListLayoutsRequest(), timeout=CALL_S).layouts
    assert [(layout.id, layout.num_layers, layout.block_tokens) for layout in found] == [
        (first, 4, TOKENS),
        (second, 5, TOKENS),
    ]
    assert found[0].blob == layout_blob()


def test_a_million_keys_are_refused_and_cost_no_more_than_their_message(calls):
    def own_memory():
        return calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S).rss_bytes

    before = own_memory()
    request = store_pb2.LookupRequest(keys=[b""] * 1_000_000)
    for _ in range(5):
        refused(lambda: calls.store.Lookup(request, timeout=CALL_S), INVALID, "1000000", "1024")
    assert own_memory() < before + (64 << 20)


def test_bytes_that_are_no_message_are_an_invalid_argument(calls):
    for method in ("Store/Lookup", "Store/Create", "Admin/Stats"):
        call = calls.channel.unary_unary(f"/kvstored.v1.{method}")
        refused(lambda call=call: call(b"\x12\xff\xff\xff", timeout=CALL_S), INVALID, "bytes")
    for kind, method in (("unary_stream", "Store/Get"), ("stream_unary", "Store/Write")):
        call = getattr(calls.channel, kind)(f"/kvstored.v1.{method}")
        request = b"\xff" if kind == "unary_stream" else iter([b"\xff"])
        refused(lambda call=call, request=request: call(request, timeout=CALL_S), INVALID, "bytes")
    assert "call_failed" not in calls.daemon.log() and "Traceback" not in calls.daemon.log()


def test_calls_in_progress_are_bounded(daemon):
    """The call over max_calls is refused at once, and nobody already served is hurt."""
    kvstored = daemon(memory="64MiB", args=("--max-calls", "8", "--drain-timeout-s", "10"))
    with Calls(kvstored.dir) as calls:
        streams = [calls.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S) for _ in range(8)]
        for stream in streams:
            next(stream)
        refused(lambda: calls.states("a"), grpc.StatusCode.RESOURCE_EXHAUSTED)
        kvstored.stop()
        assert [[event.kind for event in stream] for stream in streams] == [
            [admin_pb2.EventsResponse.KIND_STOPPING]
        ] * 8


def test_a_layout_of_an_unknown_codec_is_refused(calls):
    blob = bytearray(layout_blob())
    for codec, known in ((1, True), (2, False), (1 << 31, False)):
        blob[28:32] = codec.to_bytes(4, "little")
        if known:
            assert calls.register(bytes(blob)).layout_id >= 0
        else:
            refused(lambda: calls.register(bytes(blob)), INVALID, f"codec is {codec}", "0 to 1")
