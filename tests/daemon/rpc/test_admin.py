"""The Admin service, health and reflection against a real daemon.

Method: one daemon per test, put into a state through the Store service, then asked.
"""

import os
import re
import threading
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstored.v1 import admin_pb2, store_pb2
from tests.daemon.grpc_calls import BLOCK_BYTES, CALL_S, NO_SPACE, OK, UNKNOWN, Calls, content, key, refused

# ---- operators


def test_delete_touch_and_flush(calls):
    calls.put("a", "b", "c")
    pending = calls.create([key("pending")]).lease.id
    request = store_pb2.TouchRequest(keys=[key("a"), key("x"), key("pending")])
    assert calls.store.Touch(request, timeout=CALL_S).count == 1
    request = store_pb2.DeleteRequest(keys=[key("a"), key("x"), key("pending"), key("a")])
    deleted = calls.store.Delete(request, timeout=CALL_S)
    assert list(deleted.deleted) == [True, False, False, False] and deleted.count == 1
    assert calls.admin.Flush(admin_pb2.FlushRequest(), timeout=CALL_S).deleted == 2
    assert calls.states("a", "b", "c", "pending") == [0, 0, 0, 1]
    calls.write(pending, key("pending"), content("pending"))
    assert calls.seal(pending) == [OK]


def test_list_pages_through_every_block_once(calls):
    calls.put(*range(25))
    seen, token = [], ""
    while True:
        found = calls.page(limit=7, page_token=token)
        assert len(found.blocks) <= 7
        seen.extend(block.key for block in found.blocks)
        token = found.next_page_token
        if not token:
            break
    assert sorted(seen) == sorted(key(number) for number in range(25))
    prefix = key(3)[:2]
    assert {block.key for block in calls.page(key_prefix=prefix).blocks} == {
        key(number) for number in range(25) if key(number).startswith(prefix)
    }
    assert [block.key for block in calls.page(key_prefix=key(3)).blocks] == [key(3)]


def test_blocks_that_were_used_again_are_listed_by_themselves(calls):
    calls.put(*range(25))
    assert all(0.9 < block.uses <= 1.0 for block in calls.page().blocks), "each was used when it was sealed"
    again = {key(number) for number in (3, 11, 19, 24)}
    calls.store.Touch(store_pb2.TouchRequest(keys=sorted(again)), timeout=CALL_S)
    seen, token = [], ""
    while True:
        found = calls.page(limit=3, page_token=token, min_uses=1.2)
        assert len(found.blocks) <= 3
        seen += [block.key for block in found.blocks]
        if not (token := found.next_page_token):
            break
    assert sorted(seen) == sorted(again)
    assert not calls.page(min_uses=2.5).blocks
    assert [block.key for block in calls.page(min_uses=1.2, key_prefix=key(11)).blocks] == [key(11)]
    assert not calls.page(min_uses=1.2, key_prefix=key(12)).blocks
    refused(lambda: calls.page(min_uses=1.2, page_token="x"), grpc.StatusCode.INVALID_ARGUMENT)


def test_describe_knows_a_block_and_nothing_else(calls):
    calls.put("a")
    block = calls.admin.Describe(admin_pb2.DescribeRequest(key=key("a")), timeout=CALL_S).block
    assert block.key == key("a") and block.length_bytes == BLOCK_BYTES and block.generation > 0
    refused(lambda: calls.admin.Describe(admin_pb2.DescribeRequest(key=key("x")), timeout=CALL_S), UNKNOWN)


def test_draining_refuses_new_blocks_and_waits_for_writers(calls):
    lease = calls.create([key("a")]).lease.id
    answer = calls.drain(True, wait_ms=50)
    assert answer.draining and answer.unsealed == 1
    assert [result.status for result in calls.create([key("b")]).results] == [NO_SPACE]
    sealer = threading.Timer(0.1, lambda: calls.seal(lease, zero_rest=True))
    sealer.start()
    answer = calls.drain(True, wait_ms=15_000)
    sealer.join()
    assert answer.unsealed == 0 and calls.states("a") == [2], "reading goes on"
    assert not calls.drain(False).draining
    calls.put("b")


def test_a_scrub_finds_and_drops_what_is_corrupt(calls):
    calls.put("a", "b", "c")
    first = calls.scrub()[-1]
    assert (first.verified, first.computed, first.corrupt, first.done) == (0, 3, 0, True)
    calls.corrupt("b")
    with_event = calls.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S)
    next(with_event)
    second = calls.scrub()[-1]
    assert (second.verified, second.corrupt) == (3, 1)
    assert second.read_bytes == 3 * BLOCK_BYTES
    assert calls.states("a", "b", "c") == [2, 0, 2]
    assert calls.stats()["corrupt"] == 1
    event = next(event for event in with_event if event.kind == admin_pb2.EventsResponse.KIND_CORRUPTION)
    assert dict(event.counts) == {"corrupt": 1}


def test_stats_add_up(calls):
    calls.put("a", "b")
    calls.get("a", "x")
    calls.create([key("c")])
    found = calls.stats()
    assert {name: found[name] for name in ("blocks", "unsealed", "seals", "creates", "hits", "misses")} == {
        "blocks": 2, "unsealed": 1, "seals": 2, "creates": 3, "hits": 1, "misses": 1,
    }  # fmt: skip
    assert found["capacity_bytes"] == 64 << 20 and found["used_bytes"] >= 3 * BLOCK_BYTES
    reply = calls.admin.Stats(admin_pb2.StatsRequest(namespace="default"), timeout=CALL_S)
    assert reply.leases == 1 and reply.pid == calls.daemon.pid and 0 < reply.rss_bytes < 200 << 20
    refused(lambda: calls.admin.Stats(admin_pb2.StatsRequest(namespace="x"), timeout=CALL_S), UNKNOWN)


def test_config_is_what_the_daemon_runs_with(calls):
    config = calls.admin.Config(admin_pb2.ConfigRequest(), timeout=CALL_S)
    entries = {entry.name: entry for entry in config.entries}
    assert (entries["memory"].value, entries["memory"].source, entries["memory"].unit) == (
        "64MiB",
        "flag",
        "bytes",
    )
    assert (entries["max_pins"].value, entries["max_pins"].source) == ("65536", "default")


def test_events_tell_what_happens(calls):
    kinds = admin_pb2.EventsResponse
    stream = calls.admin.Events(admin_pb2.EventsRequest(interval_ms=100), timeout=CALL_S)
    assert next(stream).kind == kinds.KIND_OPEN
    calls.put("a", "b")
    event = next(stream)
    assert event.kind == kinds.KIND_BLOCKS and event.namespace == "default"
    total = dict(event.counts)
    while total.get("sealed", 0) < 2:
        for name, count in next(stream).counts.items():
            total[name] = total.get(name, 0) + count
    assert total == {"created": 2, "sealed": 2}
    calls.drain(True)
    calls.drain(True)
    calls.drain(False)
    told = [next(stream) for _ in range(4)]
    assert [(event.kind, event.text.partition(":")[0]) for event in told] == [
        (kinds.KIND_DEGRADED, "draining"), (kinds.KIND_DRAIN, "on"),
        (kinds.KIND_RECOVERED, "draining"), (kinds.KIND_DRAIN, "off"),
    ]  # fmt: skip
    calls.create([key("late")], lease_ttl_ms=50)
    event = next(event for event in stream if event.kind == kinds.KIND_LEASE_EXPIRED)
    assert dict(event.counts) == {"aborted": 1}


def test_subscribers_are_bounded(daemon):
    kvstored = daemon(memory="64MiB", args=("--max-subscribers", "1"))
    with Calls(kvstored.dir) as calls:
        first = calls.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S)
        next(first)
        refused(
            lambda: calls.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S),
            grpc.StatusCode.RESOURCE_EXHAUSTED, "max_subscribers",
        )  # fmt: skip


def test_sessions_are_empty_without_clients(calls):
    assert list(calls.admin.Sessions(admin_pb2.SessionsRequest(), timeout=CALL_S).sessions) == []


# ---- health and reflection


def test_health_says_serving_for_every_service(calls):
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "kvstored.v1.Store", "kvstored.v1.Admin", "kvstored.v1.Transfer"):
        request = health_pb2.HealthCheckRequest(service=service)
        assert calls.health.Check(request, timeout=CALL_S).status == serving
        assert next(calls.health.Watch(request, timeout=CALL_S)).status == serving
    unknown = health_pb2.HealthCheckRequest(service="nobody")
    refused(lambda: calls.health.Check(unknown, timeout=CALL_S), UNKNOWN)
    answer = next(calls.health.Watch(unknown, timeout=CALL_S)).status
    assert answer == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_reflection_lists_the_services_and_their_files(calls):
    stub = reflection_pb2_grpc.ServerReflectionStub(calls.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvstored.v1.Store"),
    ]
    listed, file = stub.ServerReflectionInfo(iter(requests), timeout=CALL_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {
        "kvstored.v1.Store",
        "kvstored.v1.Admin",
        "kvstored.v1.Transfer",
        "grpc.health.v1.Health",
    } <= names
    assert b"kvstored/v1/store.proto" in file.file_descriptor_response.file_descriptor_proto[0]


def test_a_harmed_namespace_says_so_and_the_others_are_served(daemon):
    kvstored = daemon(memory="64MiB", args=("--namespaces", "harmed=0.5,other=0.5"))
    with Calls(kvstored.dir, namespace="harmed") as harmed, Calls(kvstored.dir, namespace="other") as other:
        harmed.put("a")
        other.put("a")
        prefixes = set(re.findall(r"kvstored-[0-9a-f]+-\d+", (kvstored.dir / "state.json").read_text()))
        (prefix,) = (name for name in prefixes if name.endswith("-0"))
        events = other.admin.Events(admin_pb2.EventsRequest(), timeout=CALL_S)
        next(events)
        os.truncate(Path("/dev/shm") / f"{prefix}.pool", 0)
        unavailable = grpc.StatusCode.UNAVAILABLE
        refused(lambda: harmed.create([key("b")]), unavailable, "truncated")
        refused(lambda: harmed.get("a"), unavailable, "truncated")
        refused(lambda: harmed.follow("a"), unavailable, "truncated")
        other.put("b")
        assert other.get("a", "b") == [content("a"), content("b")]
        reply = other.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
        found = {row.namespace: (row.counters["fenced"], row.problem) for row in reply.namespaces}
        assert (
            found["other"] == (0, "") and found["harmed"][0] == 1 and found["harmed"][1].startswith("fenced")
        )
        request = health_pb2.HealthCheckRequest()
        assert other.health.Check(request, timeout=CALL_S).status == health_pb2.HealthCheckResponse.SERVING
        assert not other.drain(True).unsealed
        event = next(event for event in events if event.kind == admin_pb2.EventsResponse.KIND_PROBLEM)
        assert event.namespace == "harmed" and "truncated" in event.text
        assert kvstored.log().count(" error namespace_problem namespace=harmed ") == 1
