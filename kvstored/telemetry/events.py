"""What happens, told to whoever subscribed: a bounded queue each, and a count of what did not fit.

Owns the subscribers. Never blocks the one who publishes, and costs nothing while nobody listens. No event
holds a key. Invariant: an event is either delivered or counted in `dropped` of the next one delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvstored.errors import NoSpace


@dataclass
class Event:
    kind: str  # a name of EventsResponse.Kind without KIND_
    namespace: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    text: str = ""
    time_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    dropped: int = 0


class Subscriber:
    """One listener's queue."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._queue: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._dropped = 0
        self.closed = False

    def put(self, event: Event, last: bool = False) -> None:
        if len(self._queue) >= self._max_events and not last:
            self._dropped += 1
            return
        # A copy: `dropped` is this subscriber's own.
        self._queue.append(
            Event(event.kind, event.namespace, event.counts, event.text, event.time_ms, self._dropped)
        )
        self._dropped = 0
        self._arrived.set()

    def close(self) -> None:
        self.closed = True
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.closed and not self._queue

    async def take(self, timeout_s: float) -> list[Event]:
        """What has arrived, or [] at the end of the time or when the daemon stops."""
        if not self._queue and not self.closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                pass
        self._arrived.clear()
        taken = list(self._queue)
        self._queue.clear()
        return taken


class Events:
    def __init__(self, max_subscribers: int, max_events: int) -> None:
        self._max_subscribers = max_subscribers
        self._max_events = max_events
        self._subscribers: set[Subscriber] = set()
        self._stopping = False

    def limit(self, max_subscribers: int, max_events: int) -> None:
        """Other bounds, for the subscribers that come from now on."""
        self._max_subscribers, self._max_events = max_subscribers, max_events

    def __len__(self) -> int:
        return len(self._subscribers)

    def publish(self, event: Event) -> None:
        for subscriber in self._subscribers:
            subscriber.put(event)

    def stop(self) -> None:
        """Ends all streams, after one last event."""
        self._stopping = True
        for subscriber in self._subscribers:
            subscriber.put(Event("STOPPING", text="the daemon is stopping"), last=True)
            subscriber.close()

    async def subscribe(self, interval_s: float, sample: Sampler) -> AsyncIterator[Event]:
        """Events from now on, until the daemon stops. Block counts are sampled every `interval_s`. Raises
        NoSpace at the limit."""
        if self._stopping or len(self._subscribers) >= self._max_subscribers:
            raise NoSpace(
                f"{len(self._subscribers)} subscribers are listening, "
                f"the limit is {self._max_subscribers} (max_subscribers)"
            )
        subscriber = Subscriber(self._max_events)
        self._subscribers.add(subscriber)
        loop = asyncio.get_running_loop()
        try:
            sample.changes()
            yield Event("OPEN")
            next_sample = loop.time() + interval_s
            while True:
                for event in await subscriber.take(max(0.0, next_sample - loop.time())):
                    yield event
                if subscriber.ended:
                    return
                if loop.time() >= next_sample:
                    next_sample = loop.time() + interval_s
                    for event in sample.changes():
                        yield event
        finally:
            self._subscribers.discard(subscriber)


class Sampler:
    """Turns growing counters into increases. One per subscriber."""

    # the store's counter -> the event's count
    COUNTERS: ClassVar[dict[str, str]] = {
        "creates": "created",
        "seals": "sealed",
        "evictions": "evicted",
        "deletes": "deleted",
        "expired": "expired",
        "aborts": "aborted",
    }

    def __init__(self, read: Mapping[str, Callable[[], Mapping[str, int]]]) -> None:
        """`read`: per namespace what returns the store's stats."""
        self._read = read
        self._seen: dict[tuple[str, str], int] = {}

    def changes(self) -> list[Event]:
        events = []
        for namespace, stats in self._read.items():
            counts = {}
            for name, value in stats().items():
                if name not in self.COUNTERS:
                    continue
                grown = value - self._seen.get((namespace, name), value)
                self._seen[(namespace, name)] = value
                if grown > 0:
                    counts[self.COUNTERS[name]] = grown
            if counts:
                events.append(Event("BLOCKS", namespace, counts))
        return events
