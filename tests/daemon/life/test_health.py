"""What a real daemon says of itself: health per namespace, degraded states by name, through every door.

Method: each failure is made for real (a client cuts the pool, a drain, a session thread that is stopped);
status, --json, gRPC health, metrics and events must tell it by the same name, and its end.
"""

import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvstored.v1 import admin_pb2
from tests.daemon.grpc_calls import CALL_S, Calls, refused
from tests.fault.supervisor import Supervisor
from tests.warm_python import WarmDaemon, run

ROOT = Path(__file__).resolve().parents[3]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def watched(daemon):
    """A daemon of two namespaces with metrics, its services, and `metrics()`: name and labels -> value."""
    port = free_port()
    kvstored = daemon("64MiB", ("--metrics-port", str(port), "--namespaces", "default=0.5,other=0.5"))

    def metrics():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=CALL_S) as reply:
            lines = reply.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    kvstored.metrics, kvstored.port = metrics, port
    with Calls(kvstored.dir) as calls:
        kvstored.calls = calls
        yield kvstored


def health_of(kvstored, service):
    return kvstored.calls.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S).status


def status(kvstored, *words):
    command = [sys.executable, "-m", "kvstored", "status", "--dir", str(kvstored.dir), *words]
    return run(command, timeout=60, check=True, python=WarmDaemon, cwd=ROOT).stdout


def degraded(kvstored):
    reply = kvstored.calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
    return {(entry.state, entry.namespace) for entry in reply.degraded}


def cut_pool(kvstored, namespace):
    pools = json.loads((kvstored.dir / "state.json").read_text())["pools"]
    os.truncate(f"/dev/shm/{pools[namespace]['prefix']}.pool", 4096)


def test_a_healthy_daemon_serves_each_namespace_and_probes_leave_nothing(watched):
    for service in ("", "kvstored.v1.Store", "kvstored.v1.Store/default", "kvstored.v1.Store/other"):
        assert health_of(watched, service) == SERVING
    unknown = health_pb2.HealthCheckRequest(service="kvstored.v1.Store/nobody")
    refused(lambda: watched.calls.health.Check(unknown, timeout=CALL_S), grpc.StatusCode.NOT_FOUND)
    assert degraded(watched) == set()
    reply = watched.calls.admin.Stats(admin_pb2.StatsRequest(), timeout=CALL_S)
    for counters in (namespace.counters for namespace in reply.namespaces):
        assert counters["seals"] == counters["deletes"] > 0, "a block was made, sealed, deleted"
        assert counters["used_bytes"] == counters["blocks"] == 0
    found = watched.metrics()
    assert found['kvstored_namespace_serving{namespace="other"}'] == 1
    assert found['kvstored_degraded{state="namespace_fenced",namespace="other"}'] == 0


def test_a_fenced_namespace_does_not_serve_and_the_others_do(watched, wait_until):
    events = watched.calls.admin.Events(admin_pb2.EventsRequest(interval_ms=60_000), timeout=CALL_S)
    next(events)
    cut_pool(watched, "other")
    wait_until(lambda: ("namespace_fenced", "other") in degraded(watched), "the fence is told")
    assert health_of(watched, "kvstored.v1.Store/other") == NOT_SERVING
    assert health_of(watched, "kvstored.v1.Store/default") == health_of(watched, "") == SERVING
    found = watched.metrics()
    assert found['kvstored_degraded{state="namespace_fenced",namespace="other"}'] == 1
    assert found['kvstored_namespace_serving{namespace="other"}'] == 0
    assert found['kvstored_namespace_serving{namespace="default"}'] == 1
    assert re.search(r"^DEGRADED  namespace_fenced \(other\): ", status(watched), re.MULTILINE)
    (entry,) = json.loads(status(watched, "--json"))["degraded"]
    assert (entry["state"], entry["namespace"]) == ("namespace_fenced", "other") and entry["since_ms"]
    told = next(event for event in events if event.text.startswith("namespace_fenced: "))
    assert (told.kind, told.namespace) == (admin_pb2.EventsResponse.KIND_DEGRADED, "other")
    with urllib.request.urlopen(f"http://127.0.0.1:{watched.port}/healthz", timeout=CALL_S) as reply:
        assert reply.status == 200, "the other namespace is served"


def test_a_daemon_whose_namespaces_are_all_fenced_does_not_serve(watched, wait_until):
    cut_pool(watched, "other")
    cut_pool(watched, "default")
    both = {("namespace_fenced", "other"), ("namespace_fenced", "default")}
    wait_until(lambda: degraded(watched) >= both, "both fences are told")
    assert health_of(watched, "") == NOT_SERVING
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{watched.port}/healthz", timeout=CALL_S)
    assert caught.value.code == 503


def test_the_watchdog_is_fed_only_while_a_namespace_does_its_work(daemon, wait_until):
    kvstored = daemon("64MiB", start=False)
    supervisor = Supervisor(kvstored, watchdog_s=0.2)
    try:
        supervisor.start()
        supervisor.wait(lambda: supervisor.said.count("WATCHDOG=1") > 2)
        cut_pool(kvstored, "default")
        with Calls(kvstored.dir) as kvstored.calls:
            wait_until(lambda: ("namespace_fenced", "default") in degraded(kvstored), "the fence is told")
            assert health_of(kvstored, "") == NOT_SERVING
            fed = supervisor.said.count("WATCHDOG=1")
            with pytest.raises(AssertionError):  # in ten times the interval; some of before may be read late
                supervisor.wait(lambda: supervisor.said.count("WATCHDOG=1") > fed + 4, timeout_s=1.0)
        assert kvstored.stop() == 0
    finally:
        supervisor.close()


def test_draining_is_a_state_and_ends(watched):
    events = watched.calls.admin.Events(admin_pb2.EventsRequest(interval_ms=60_000), timeout=CALL_S)
    next(events)
    watched.calls.drain(True)
    assert degraded(watched) == {("draining", "")}
    assert health_of(watched, "") == SERVING, "reading goes on"
    assert watched.metrics()['kvstored_degraded{state="draining",namespace=""}'] == 1
    watched.calls.drain(False)
    assert degraded(watched) == set()
    kinds = [next(events).kind for _ in range(4)]
    names = admin_pb2.EventsResponse
    assert kinds.count(names.KIND_DEGRADED) == kinds.count(names.KIND_RECOVERED) == 1


def test_a_session_thread_that_hangs_is_noticed(watched, wait_until):
    """SIGSTOP would stop the whole process, so its socket is replaced by one that nobody serves."""
    path = watched.dir / "kvstored.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        wait_until(lambda: health_of(watched, "") == NOT_SERVING, "a probe that began after it notices")
        assert degraded(watched) == {("sessions_not_answering", "")}


def test_every_operation_has_a_latency_histogram(watched, wait_until):
    with watched.connect() as client:
        client.stats()
    watched.calls.put("a")
    labels = '{namespace="default",operation="stats"'
    count = f"kvstored_session_request_seconds_count{labels}}}"
    wait_until(lambda: watched.metrics()[count] == 1, "it is counted")  # after its answer
    found = watched.metrics()
    assert found[f'kvstored_session_request_seconds_bucket{labels},le="+Inf"}}'] == 1
    assert found['kvstored_session_request_seconds_count{namespace="other",operation="stats"}'] == 0
    assert found['kvstored_grpc_call_seconds_count{method="Seal"}'] == 1
    assert 0 < found['kvstored_grpc_call_seconds_sum{method="Seal"}'] < CALL_S
