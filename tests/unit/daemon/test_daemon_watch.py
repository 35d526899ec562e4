"""What the daemon looks at on its own goes on, whatever one of its namespaces does, or says that it does not.

Method: the watch is driven alone; a store is a recorder of the calls it gets.
"""

import asyncio
import threading

from kvstored import watch
from kvstored.errors import Fenced
from kvstored.process import limits
from kvstored.rpc.admin import AdminService
from kvstored.rpc.calls import CallCounts, Threads
from kvstored.telemetry.events import Events
from kvstored.v1 import admin_pb2
from kvstored.watch import Watch


class Store:
    """Stands for a store of three blocks that is verified: raises `error`, or finds a corrupt block each
    time."""

    def __init__(self, error=None):
        self.error, self.begun_at = error, []

    def stats(self):
        return {"used_bytes": 3}

    def scrub(self, from_record, limit_bytes):
        self.begun_at.append(from_record)
        if self.error:
            raise self.error
        return {
            "verified": 1, "computed": 0, "corrupt": 1, "bytes": 1, "next": from_record + 1,
            "done": from_record == 2,
        }  # fmt: skip


class NoTier:
    def watch(self, degraded):
        pass


def scrubbed(stores, enough, monkeypatch):
    """Runs the background verification until `enough()`; the lines that were logged."""
    monkeypatch.setattr(watch, "SCRUB_S", 0.001)
    logged = []
    monkeypatch.setattr(watch.log, "error", lambda event, **fields: logged.append((event, fields)))

    async def scenario():
        threads = Threads(1)
        background = Watch(stores, (), Events(1, 8), threads, "")
        task = asyncio.ensure_future(background._scrub(lambda: 1 << 30))
        task.add_done_callback(watch._ended)
        async with asyncio.timeout(20):
            while not enough(logged):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        threads.close()

    asyncio.run(scenario())
    return logged


def test_a_fenced_namespace_does_not_end_the_verification_of_the_others(monkeypatch):
    stores = {"a": Store(Fenced("harmed")), "b": Store()}
    logged = scrubbed(stores, lambda _: len(stores["b"].begun_at) > 5, monkeypatch)
    assert {fields["namespace"] for _, fields in logged} == {"b"}
    assert set(stores["a"].begun_at) == {0}, "what was not verified is, when it is no longer fenced"
    assert stores["b"].begun_at[:6] == [0, 1, 2, 0, 1, 2], "round and round"


def test_a_scrub_goes_through_all_whatever_the_background_has_seen(monkeypatch):
    store = Store()
    scrubbed({"default": store}, lambda _: len(store.begun_at) == 2, monkeypatch)
    del store.begun_at[:]

    async def scenario():
        threads = Threads(1)
        others = [None] * 5
        admin = AdminService({"default": store}, *others, Events(1, 8), threads, CallCounts(), None)
        found = [message async for message in admin.Scrub(admin_pb2.ScrubRequest(), None)]
        threads.close()
        return found

    found = asyncio.run(scenario())
    assert store.begun_at == [0, 1, 2]
    assert [(report.verified, report.done) for report in found] == [(1, False), (2, False), (3, True)]


def test_what_is_verified_in_the_background_is_what_was_asked_for_also_of_long_blocks(monkeypatch):
    """One byte a second, and a megabyte: of blocks of 16 MiB. Time is what the watch sleeps."""
    length, slept = 16 << 20, 0.0
    sleep = asyncio.sleep

    class Long(Store):
        def scrub(self, from_record, limit_bytes):
            return {**super().scrub(from_record, limit_bytes), "bytes": length, "corrupt": 0}

    async def no_time(seconds):
        nonlocal slept
        slept += seconds
        await sleep(0)

    monkeypatch.setattr(watch.asyncio, "sleep", no_time)

    async def scenario(rate, seconds):
        nonlocal slept
        slept, stores, threads = 0.0, {"a": Long(), "b": Long()}, Threads(1)
        task = asyncio.ensure_future(Watch(stores, (), Events(1, 8), threads, "")._scrub(lambda: rate))
        while slept < seconds:
            await sleep(0)
        task.cancel()
        await asyncio.wait([task])
        threads.close()
        return [len(store.begun_at) for store in stores.values()]

    assert asyncio.run(scenario(1 << 20, 100)) == [4, 4], "half of 100 MiB each, in blocks of 16"
    assert asyncio.run(scenario(1, 100)) == [1, 1], "as little as that is something"
    assert asyncio.run(scenario(0, 100)) == [0, 0]


def test_a_watch_that_ended_for_want_of_a_thread_looks_again(monkeypatch):
    monkeypatch.setattr(watch, "AGAIN_S", 0.001)
    logged = []
    monkeypatch.setattr(watch.log, "error", lambda event, **fields: logged.append((event, fields)))

    class Threadless(Threads):
        refusals = 3

        def run(self, function, *args):
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("can't start new thread")
            return super().run(function, *args)

    class Harmed:
        def problem(self):
            return "fenced: harmed"

        def lookup(self, key):
            return b"\0"

        def stats(self):
            return {"seals": 0}

    async def scenario():
        threads = Threadless(1)
        background = Watch({"a": Harmed()}, (NoTier(),), Events(1, 8), threads, "")
        background.start(lambda: 0)
        async with asyncio.timeout(60):
            while not background.degraded.gauges(["a"])["namespace_fenced", "a"]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        background.stop()
        background.health.close()
        threads.close()

    asyncio.run(scenario())
    ended = [fields["task"] for event, fields in logged if event == "watch_ended"]
    assert ended == ["_look_for_problems"] * 3


def test_a_problem_that_is_over_is_no_error(monkeypatch):
    monkeypatch.setattr(watch, "PROBLEM_LOOK_S", 0.001)
    logged = []
    for level in ("error", "info"):

        def note(event, level=level, **fields):
            logged.append((level, event, fields))

        monkeypatch.setattr(watch.log, level, note)

    class Full:
        looks = 0

        def problem(self):
            self.looks += 1
            return "the pool stays at 1 of 2 bytes" if self.looks < 3 else ""

    async def scenario():
        threads = Threads(1)
        task = asyncio.ensure_future(
            Watch({"a": Full()}, (NoTier(),), Events(1, 8), threads, "")._look_for_problems()
        )
        async with asyncio.timeout(20):
            while ("info", "recovered") not in [entry[:2] for entry in logged]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        threads.close()

    asyncio.run(scenario())
    told = [(level, fields["problem"]) for level, event, fields in logged if event == "namespace_problem"]
    assert told == [("error", "the pool stays at 1 of 2 bytes"), ("info", "none any more")]


def test_a_watch_that_ends_by_itself_is_logged(monkeypatch):
    logged = scrubbed({"a": Store(OSError("x"))}, lambda logged: logged, monkeypatch)
    assert logged == [("watch_ended", {"task": "_scrub", "error": "OSError: x"})]


def test_a_stop_that_no_thread_can_watch_comes_all_the_same(monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    logged = []
    monkeypatch.setattr(limits.log, "warning", lambda event, **fields: logged.append((event, fields)))
    monkeypatch.setattr(threading.Thread, "start", refused)
    limits.end_within(0.0, lambda: None)
    assert logged == [("stop_not_bounded", {"why": "can't start new thread"})]
