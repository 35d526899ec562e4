"""The daemon's parts that need no store: leases, events, metrics text, log lines, notify, runtime directory.

Method: each is driven alone; a store is a recorder of the calls it gets.
"""

import asyncio
import os
import socket
import threading

import pytest

from kvstored import errors, log
from kvstored.errors import LeaseEnded, NoSpace, NotFound, StartupError
from kvstored.process import runtime_dir
from kvstored.process.fd_store import Keeper
from kvstored.process.notify import notify, watchdog_interval_s
from kvstored.rpc.leases import Held, Leases
from kvstored.rpc.written import Written
from kvstored.telemetry.events import Event, Events, Sampler
from kvstored.telemetry.histogram import BOUNDS_S, Histogram
from kvstored.telemetry.metrics import STORE_METRICS
from kvstored.telemetry.metrics_server import MAX_REQUEST_BYTES, MetricsServer
from kvstored.telemetry.prometheus import Figures, render


class Recorder:
    """Stands for a store: owners that were opened and closed."""

    def __init__(self):
        self.opened, self.closed = [], []

    def open_owner(self):
        self.opened.append(len(self.opened) + 1)
        return self.opened[-1]

    def close_owner(self, owner):
        self.closed.append(owner)


def leases(max_leases=4, ttl_s=60.0):
    ended = []
    return Leases(max_leases, ttl_s, lambda namespace, aborted: ended.append((namespace, aborted))), ended


def held(key=b"k" * 32):
    return Held(key, None, 4096, Written(4096, [(0, 4096)]))


async def until(condition, deadline_s=10.0):
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# ---- leases


def test_a_lease_past_its_deadline_aborts_its_blocks_and_is_unknown():
    async def scenario():
        store = Recorder()
        table, ended = leases()
        lease = table.open("default", store, ttl_ms=20)
        lease.blocks[b"k" * 32] = held()
        await until(lambda: ended)
        assert (store.closed, ended, table.expired, len(table)) == ([1], [("default", 1)], 1, 0)
        with pytest.raises(LeaseEnded):
            table.find("default", lease.id)

    asyncio.run(scenario())


def test_a_renewed_lease_lives_on():
    async def scenario():
        store = Recorder()
        table, ended = leases()
        lease, other = table.open("default", store, ttl_ms=60_000), table.open("default", store, ttl_ms=20)
        lease.deadline = 0
        table.renew(lease)
        await until(lambda: ended)
        assert table.find("default", lease.id) is lease and other.ended and store.closed == [other.owner]
        table.end_all()

    asyncio.run(scenario())


def test_the_deadline_waits_for_a_write_that_is_running():
    """Memory that a thread is still filling must not be given to somebody else, not even when the caller
    has gone."""

    async def scenario():
        store = Recorder()
        table, _ = leases()
        lease, block = table.open("default", store, ttl_ms=60_000), held()
        lease.blocks[block.key] = block
        go = threading.Event()
        loop = asyncio.get_running_loop()
        call = asyncio.ensure_future(
            table.write(lease, block, lambda: loop.run_in_executor(None, go.wait, 10))
        )
        await until(lambda: block.writing)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        table.end(lease)
        assert store.closed == [], "the block was given back under a running write"
        go.set()
        await until(lambda: store.closed == [1])

    asyncio.run(scenario())


def test_leases_are_bounded_and_belong_to_a_namespace():
    async def scenario():
        store = Recorder()
        table, _ = leases(max_leases=2)
        first = table.open("a", store, 0)
        table.open("a", store, 0)
        with pytest.raises(NoSpace, match="limit is 2"):
            table.open("a", store, 0)
        with pytest.raises(LeaseEnded) as foreign:
            table.find("b", first.id)
        with pytest.raises(LeaseEnded) as unknown:
            table.find("b", first.id ^ 2)
        # Another namespace's lease is as unknown as none.
        assert str(foreign.value) == str(unknown.value).replace(str(first.id ^ 2), str(first.id))
        with pytest.raises(NotFound):
            first.held(b"x" * 32)
        table.drop_if_empty(first)
        assert first.ended and len(table) == 1
        table.end_all()
        assert store.closed == [1, 2]

    asyncio.run(scenario())


def test_a_lease_that_ended_is_not_kept_until_its_deadline():
    async def scenario():
        table, ended = leases()
        lease = table.open("default", Recorder(), ttl_ms=60_000)
        table.drop_if_empty(lease)
        assert lease.timer.cancelled() and ended == []

    asyncio.run(scenario())


# ---- events


def test_what_does_not_fit_is_counted_and_the_end_always_arrives():
    async def scenario():
        events = Events(max_subscribers=1, max_events=2)
        stream = events.subscribe(60.0, Sampler({}))
        assert (await anext(stream)).kind == "OPEN"
        for number in range(5):
            events.publish(Event("DRAIN", text=str(number)))
        got = [await anext(stream), await anext(stream)]
        events.publish(Event("FLUSH"))
        got.append(await anext(stream))
        events.stop()
        got.extend([event async for event in stream])
        assert [(event.kind, event.text, event.dropped) for event in got[:3]] == [
            ("DRAIN", "0", 0),
            ("DRAIN", "1", 0),
            ("FLUSH", "", 3),
        ]
        assert got[-1].kind == "STOPPING" and len(events) == 0

    asyncio.run(scenario())


def test_subscribers_are_bounded():
    async def scenario():
        events = Events(max_subscribers=1, max_events=8)
        first = events.subscribe(60.0, Sampler({}))
        await anext(first)
        with pytest.raises(NoSpace, match="limit is 1"):
            await anext(events.subscribe(60.0, Sampler({})))
        await first.aclose()
        assert len(events) == 0

    asyncio.run(scenario())


def test_block_counts_are_increases_only():
    stats = {"seals": 5, "evictions": 1, "used_bytes": 7}
    sampler = Sampler({"default": lambda: dict(stats)})
    assert sampler.changes() == []
    stats.update(seals=8, used_bytes=9)
    (event,) = sampler.changes()
    assert (event.kind, event.namespace, event.counts) == ("BLOCKS", "default", {"sealed": 3})
    assert sampler.changes() == []


# ---- errors, log, notify


def test_every_store_error_has_a_status():
    def tree(cls):
        yield cls
        for child in cls.__subclasses__():
            yield from tree(child)

    for cls in tree(errors.StoreError):
        if cls is not errors.StoreError:
            assert errors.status_name(cls("x")) != "INTERNAL", cls
    assert errors.status_name(errors.LeaseEnded("x")) == "NOT_FOUND"
    assert errors.status_name(ValueError("x")) == "INTERNAL"


def test_a_log_line_is_one_line_whatever_is_in_it():
    text = log.line(
        "info", "event", {"plain": 3, "took_ms": 1.5, "text": 'a "b"\nc=d', "empty": "", "esc": "\x1b[2J"}
    )
    assert text.count("\n") == 1 and "\x1b" not in text
    assert text.endswith(' info event plain=3 took_ms=1.500 text="a \\"b\\"\\nc=d" empty="" esc="\\x1b[2J"\n')


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_reaches_the_supervisor(abstract, tmp_path, monkeypatch):
    name = f"@kvstored-test-{os.getpid()}" if abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name[1:] if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert notify("READY=1")
        assert supervisor.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/nonexistent/socket", "/dev/null"])
def test_notify_without_a_supervisor_does_nothing(address, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")


def test_the_watchdog_is_fed_twice_in_its_time(monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert watchdog_interval_s() == 1.5
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_interval_s() == 0.0


# ---- descriptors kept by a supervisor


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many", "LISTEN_FDNAMES": "a"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "-1", "LISTEN_FDNAMES": ""},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "999999999", "LISTEN_FDNAMES": "a"},
    ],
)
def test_descriptors_for_somebody_else_or_without_names_are_not_taken(variables):
    environ = dict(variables)
    keeper = Keeper(environ)
    assert keeper.take("a") is None and not keeper.keeps and environ == {}
    assert keeper.settle(()) == []


def test_a_supervisor_that_does_not_listen_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    keeper = Keeper()
    assert keeper.keeps
    keeper.keep("a", 0)
    assert not keeper.keeps


# ---- runtime directory


def test_one_daemon_a_directory(tmp_path):
    lock = runtime_dir.Lock(str(tmp_path))
    assert runtime_dir.running_pid(str(tmp_path)) == os.getpid()
    with pytest.raises(StartupError, match=f"pid {os.getpid()}"):
        runtime_dir.Lock(str(tmp_path))
    lock.close()
    assert runtime_dir.running_pid(str(tmp_path)) is None
    runtime_dir.Lock(str(tmp_path)).close()


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    shared = tmp_path / "d"
    shared.mkdir()
    shared.chmod(0o770)
    with pytest.raises(StartupError, match="mode 0770"):
        runtime_dir.prepare(str(shared))
    shared.chmod(0o755)
    runtime_dir.prepare(str(shared))
    link = tmp_path / "link"
    link.symlink_to(shared)
    with pytest.raises(StartupError, match=f"is a symbolic link: name '{shared}' itself"):
        runtime_dir.prepare(str(link))


def test_a_small_file_is_read_only_if_it_is_ours_alone(tmp_path):
    path = str(tmp_path / "state.json")
    assert runtime_dir.read_json(path) == (None, "absent")
    runtime_dir.write_whole(path, b'{"a": 1}')
    assert runtime_dir.read_json(path) == ({"a": 1}, "")
    os.link(path, path + ".2")
    assert "2 links" in runtime_dir.read_json(path)[1]
    os.unlink(path + ".2")
    os.chmod(path, 0o644)
    assert "0644" in runtime_dir.read_json(path)[1]
    os.chmod(path, 0o600)
    runtime_dir.write_whole(path, b"[" * 100_000)
    assert "no JSON" in runtime_dir.read_json(path)[1]
    os.unlink(path)
    os.mkfifo(path, 0o600)
    assert "foreign" in runtime_dir.read_json(path)[1], "a pipe must not block the start"


# ---- metrics


def test_metrics_text_has_one_help_and_type_per_name_and_plain_labels():
    stats = dict.fromkeys(STORE_METRICS, 3)
    text = render(
        Figures(stores={"a": stats, "b": stats}, process={"leases": 1}, calls={("Lookup", "OK"): 2})
    )
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) and all(name.startswith("kvstored_") for name in names)
    assert 'kvstored_hits_total{namespace="b"} 3' in text
    assert 'kvstored_grpc_calls_total{method="Lookup",status="OK"} 2' in text


def test_a_histogram_is_cumulative_and_ends_with_all():
    took = Histogram()
    for took_ns in (0, 1024, 1025, 3_000_000, 10**12):
        took.add(took_ns)
    text = render(Figures(call_seconds={"Get": took}))
    buckets = [line for line in text.splitlines() if line.startswith("kvstored_grpc_call_seconds_bucket")]
    counts = [float(line.rsplit(" ", 1)[1]) for line in buckets]
    assert counts[:3] == [2, 3, 3] and counts[-2:] == [4, 5] and len(counts) == len(BOUNDS_S) + 1
    assert 'kvstored_grpc_call_seconds_bucket{method="Get",le="+Inf"} 5' in text
    assert 'kvstored_grpc_call_seconds_bucket{method="Get",le="1.024e-06"} 2' in text
    assert 'kvstored_grpc_call_seconds_count{method="Get"} 5' in text and took.sum_s > 1000


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"503"),
        (b"GET /secret HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 2 * MAX_REQUEST_BYTES + b" HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_the_metrics_server_answers_only_its_two_paths(request_bytes, status):
    async def scenario():
        async def text():
            return "metrics 1\n"

        async def healthy():
            return False

        server = MetricsServer(text, healthy)
        port = await server.start(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        answer = await reader.read(-1)
        assert answer.split(b" ")[1] == status
        writer.close()
        server.close()

    asyncio.run(scenario())


def test_who_does_not_read_the_metrics_is_cut_off(monkeypatch):
    monkeypatch.setattr("kvstored.telemetry.metrics_server.REQUEST_TIMEOUT_S", 0.01)

    async def scenario():
        asked = asyncio.Event()

        async def text():
            asked.set()
            return "x" * (64 << 20)  # more than the kernel takes for nobody

        async def healthy():
            return True

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        server = MetricsServer(text, healthy)
        port, before = await server.start(0), descriptors()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await asked.wait()
            await until(lambda: descriptors() == before + 1)
        server.close()

    asyncio.run(scenario())
