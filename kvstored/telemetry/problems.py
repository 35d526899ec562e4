"""What is wrong and by which name: the degraded states of the daemon and of each namespace.

Owns the set of states that hold at the moment. Decides nothing: whoever notices a failure calls set(),
whoever sees it end calls clear(). On the event loop's thread only. Invariant: a state is one of STATES, and
each change is told once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """`serving`: whether clients are still answered while it holds. `of_daemon`: it concerns no namespace."""

    text: str
    serving: bool = True
    of_daemon: bool = False


# docs/operations.md says for each what to do. A test compares the two.
STATES: dict[str, State] = {
    "namespace_fenced": State("a client harmed the memory: the namespace is refused", serving=False),
    "namespace_not_answering": State("a look-up or a create and seal did not end in time", serving=False),
    "sessions_not_answering": State("the session socket did not answer", serving=False, of_daemon=True),
    "pool_cannot_grow": State("the file system has no more memory: the pool stays smaller"),
    "pool_not_kept": State("no supervisor keeps the memory: the blocks end with this process"),
    "draining": State("new blocks are refused on request", of_daemon=True),
    "reload_refused": State("the changed configuration is wrong: the old one is in effect", of_daemon=True),
    "certificate_refused": State("other hosts refuse this daemon's certificate", of_daemon=True),
    "disk_failed": State("the disk answers errors: the store goes on without it"),
    "disk_full": State("the disk has no room: blocks are not written behind"),
    "disk_read_only": State("the disk cannot be written: blocks on it are still found"),
}


@dataclass(frozen=True)
class Entry:
    state: str
    namespace: str
    text: str
    since_ms: int


class Degraded:
    """`changed(entry, holds)` is called after each change."""

    def __init__(self, changed: Callable[[Entry, bool], None] = lambda entry, holds: None) -> None:
        self._changed = changed
        self._entries: dict[tuple[str, str], Entry] = {}

    def set(self, state: str, namespace: str = "", text: str = "") -> None:
        """The state holds from now on; again with another text changes the text only."""
        known = self._entries.get((state, namespace))
        if known is not None and known.text == (text or STATES[state].text):
            return
        since_ms = known.since_ms if known else int(time.time() * 1000)
        entry = Entry(state, namespace, text or STATES[state].text, since_ms)
        self._entries[(state, namespace)] = entry
        self._changed(entry, True)

    def clear(self, state: str, namespace: str = "") -> None:
        if entry := self._entries.pop((state, namespace), None):
            self._changed(entry, False)

    def put(self, holds: bool, state: str, namespace: str = "", text: str = "") -> None:
        if holds:
            self.set(state, namespace, text)
        else:
            self.clear(state, namespace)

    def active(self) -> list[Entry]:
        """The oldest first."""
        return sorted(self._entries.values(), key=lambda entry: entry.since_ms)

    def serves(self, namespace: str) -> bool:
        """Whether no state says that the clients of this namespace are not served."""
        return not any(
            not STATES[entry.state].serving and entry.namespace in ("", namespace)
            for entry in self._entries.values()
        )

    def gauges(self, namespaces: Iterable[str]) -> dict[tuple[str, str], int]:
        """(state, namespace) -> 1 or 0, for every state and namespace there can be."""
        known = tuple(namespaces)
        return {
            (state, namespace): int((state, namespace) in self._entries)
            for state, about in STATES.items()
            for namespace in (("",) if about.of_daemon else known)
        }
