"""What the daemon looks at on its own: problems of its stores, its health, its supervisor's watchdog.

Owns the loops that look, and turns what they find into degraded states, events and log lines, once per
change. Changes no store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstored import log
from kvstored.errors import Fenced
from kvstored.process.notify import notify, watchdog_interval_s
from kvstored.rpc.calls import Threads
from kvstored.telemetry.events import Event, Events
from kvstored.telemetry.health import Health
from kvstored.telemetry.problems import Degraded, Entry
from kvstored.tiers.disk import Tiers
from kvstored.tiers.peers import Peers

Loop = Callable[[], Coroutine[Any, Any, None]]

PROBLEM_LOOK_S = 1.0
PROBE_S = 5.0
SCRUB_S = 0.25
AGAIN_S = 5.0  # after a loop that ended by itself


class Watch:
    def __init__(
        self,
        stores: dict[str, Any],
        watched: Sequence[Tiers | Peers],
        events: Events,
        threads: Threads,
        socket_path: str,
    ) -> None:
        self.degraded = Degraded(self._changed)
        self.health = Health(stores, socket_path, self.degraded)
        self._stores = stores
        self._watched = watched
        self._events = events
        self._threads = threads
        self._known = dict.fromkeys(stores, "")  # problems, as they were last told
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped = False

    def start(self, scrub_rate: Callable[[], int]) -> None:
        """scrub_rate: bytes a second, asked each time."""
        loops: list[Loop] = [self._look_for_problems, self._probe, lambda: self._scrub(scrub_rate)]
        if watchdog_interval_s():
            loops.append(self._feed_watchdog)
        for loop in loops:
            self._begin(loop)

    def stop(self) -> None:
        self._stopped = True
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, loop: Loop) -> None:
        """Runs the loop, and again if it ends by itself: for want of a thread, say, which is soon over."""
        if self._stopped:
            return

        def ended(done: asyncio.Task[None]) -> None:
            if _ended(done):
                done.get_loop().call_later(AGAIN_S, self._begin, loop)

        task = asyncio.get_running_loop().create_task(loop())
        self._tasks[task.get_coro().__name__] = task
        task.add_done_callback(ended)

    def _changed(self, entry: Entry, holds: bool) -> None:
        note, event = (log.warning, "degraded") if holds else (log.info, "recovered")
        note(event, state=entry.state, namespace=entry.namespace, why=entry.text)
        kind = "DEGRADED" if holds else "RECOVERED"
        self._events.publish(Event(kind, entry.namespace, text=f"{entry.state}: {entry.text}"))

    async def _look_for_problems(self) -> None:
        """What the stores find wrong on their own: a fenced namespace, a pool that cannot grow."""
        known = self._known
        while True:
            for name, store in self._stores.items():
                problem = await self._threads.run(store.problem)
                if problem == known[name]:
                    continue
                known[name] = problem
                note = log.error if problem else log.info
                note("namespace_problem", namespace=name, problem=problem or "none any more")
                self._events.publish(Event("PROBLEM", name, text=problem))
                fenced = problem.startswith("fenced")
                self.degraded.put(fenced, "namespace_fenced", name, problem)
                self.degraded.put(bool(problem) and not fenced, "pool_cannot_grow", name, problem)
            for part in self._watched:
                part.watch(self.degraded)
            await asyncio.sleep(PROBLEM_LOOK_S)

    async def _scrub(self, scrub_rate: Callable[[], int]) -> None:
        """Verifies checksums in the background, so many bytes a second of all namespaces together, each round
        and round. A block longer than what is due is verified whole, and the next one waits for it."""
        at = dict.fromkeys(self._stores, 0)  # the record to go on from
        due = dict.fromkeys(self._stores, 0.0)  # bytes
        while True:
            await asyncio.sleep(SCRUB_S)
            share = scrub_rate() * SCRUB_S / len(self._stores)
            for name, store in self._stores.items() if share else ():
                due[name] = min(due[name] + share, max(share, 1.0))  # what was not used is not saved
                if due[name] < 1:
                    continue
                try:
                    step = await self._threads.run(store.scrub, at[name], int(due[name]))
                except Fenced:  # _look_for_problems tells it; the others are verified on
                    continue
                due[name] -= step["bytes"]
                at[name] = 0 if step["done"] else step["next"]
                corrupt = step["corrupt"]
                if corrupt:
                    self._events.publish(Event("CORRUPTION", name, {"corrupt": corrupt}))
                    log.error("corrupt_blocks", namespace=name, count=corrupt)

    async def _probe(self) -> None:
        """Looks only: a probe that writes is for those who ask."""
        while True:
            await self.health.look(write=False)
            await asyncio.sleep(PROBE_S)

    async def _feed_watchdog(self) -> None:
        """Tells the supervisor that the store still works; a daemon whose store does not is restarted, with
        its cache."""
        while True:
            if await self.health.answers():
                notify("WATCHDOG=1")
            await asyncio.sleep(watchdog_interval_s())


def _ended(task: asyncio.Task[None]) -> bool:
    """Whether a loop ended before it was stopped. That is a bug, or the machine has no thread for it: nobody
    awaits it, so nobody else would say so."""
    if task.cancelled() or (error := task.exception()) is None:
        return False
    log.error("watch_ended", task=task.get_coro().__name__, error=f"{type(error).__name__}: {error}")
    return True
