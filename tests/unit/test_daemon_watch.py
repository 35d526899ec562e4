"""What the daemon looks at on its own goes on, whatever one of its namespaces does, or says that it does not.

Method: the watch is driven alone; a store is a recorder of the calls it gets.
"""

import asyncio

from kvstored import watch
from kvstored.calls import Threads
from kvstored.errors import Fenced
from kvstored.events import Events
from kvstored.watch import Watch


class Store:
    """Stands for a store that is verified: raises `error`, or finds a corrupt block each time."""

    def __init__(self, error=None):
        self.error, self.scrubs = error, 0

    def scrub(self, limit_bytes):
        self.scrubs += 1
        if self.error:
            raise self.error
        return {"corrupt": 1}


def scrubbed(stores, enough, monkeypatch):
    """Runs the background verification until `enough()`; the lines that were logged."""
    monkeypatch.setattr(watch, "SCRUB_S", 0.001)
    logged = []
    monkeypatch.setattr(watch.log, "error", lambda event, **fields: logged.append((event, fields)))

    async def scenario():
        threads = Threads(1)
        one = Watch(stores, None, Events(1, 8), threads, "")
        task = asyncio.ensure_future(one._scrub(lambda: 1 << 30))
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
    logged = scrubbed(stores, lambda _: stores["b"].scrubs > 2, monkeypatch)
    assert stores["a"].scrubs > 2 and {fields["namespace"] for _, fields in logged} == {"b"}


def test_a_watch_that_ends_by_itself_is_logged(monkeypatch):
    logged = scrubbed({"a": Store(OSError("x"))}, lambda logged: logged, monkeypatch)
    assert logged == [("watch_ended", {"task": "_scrub", "error": "OSError: x"})]
