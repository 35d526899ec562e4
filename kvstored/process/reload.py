"""Reading the configuration again while the daemon runs: what can change does, the rest is told.

Owns the configuration in effect. Knows which fields may change at run time: those that the server has named,
with a way to apply them. Invariant: a file that is wrong changes nothing at all, and what `config` says is in
effect.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstored import log
from kvstored.config.config import Config
from kvstored.config.sources import Sourced, load
from kvstored.errors import ConfigError, FailedPrecondition
from kvstored.process.notify import notify
from kvstored.telemetry.problems import Degraded

Apply = Callable[[Config], None]
Part = Callable[[Any, Any], Any]


def _all(before: Any, after: Any) -> Any:
    return after


@dataclass(frozen=True)
class Change:
    """One field whose value is another now. `applied`: it is in effect; else after a restart."""

    name: str
    before: str
    after: str
    applied: bool


class Reload:
    def __init__(self, sourced: Sourced, degraded: Degraded) -> None:
        self.sourced = sourced
        self.applied_total = 0
        self.refused_total = 0
        self._degraded = degraded
        self._apply: dict[str, Apply] = {}
        self._part: dict[str, Part] = {}
        self._read: list[Apply] = []

    @property
    def config(self) -> Config:
        return self.sourced.config

    def can(self, *fields: str, apply: Apply = lambda config: None, part: Part = _all) -> None:
        """These fields may change: `apply` gets what holds from now on. It must not fail. Where only a part
        of a field may change, `part(before, after)` says what can hold now, or raises ConfigError."""
        known = {about.name for about in dataclasses.fields(Config)}
        assert known.issuperset(fields), fields
        self._apply.update(dict.fromkeys(fields, apply))
        self._part.update(dict.fromkeys(fields, part))

    def reads(self, read: Apply) -> None:
        """Files that the configuration names: read at each reload. Raises ConfigError where they are wrong,
        and then nothing changes."""
        self._read.append(read)

    def again(self) -> list[Change]:
        """Reads the file anew; flags and environment are those of the start. Raises FailedPrecondition, and
        nothing has changed, if it is wrong."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            return self._again()
        finally:
            notify("READY=1")

    def _again(self) -> list[Change]:
        try:
            wanted = load(self.sourced.flags, os.environ, self.sourced.file or None)
            changes, applied = self._plan(wanted.config)
            try:
                config = dataclasses.replace(self.config, **applied)
            except ConfigError:
                # Right as a whole, as load() found, but not beside the `disk` or the parts of namespaces that
                # stay until a restart: the quota waits for it with them.
                changes, applied = self._plan(wanted.config, later=("disk_quota",))
                config = dataclasses.replace(self.config, **applied)
            for read in self._read:
                read(config)
        except ConfigError as error:
            self.refused_total += 1
            self._degraded.set("reload_refused", text=str(error))
            raise FailedPrecondition(f"the configuration is wrong, the old one stays: {error}") from error
        sources = {
            name: (wanted if name in applied else self.sourced).sources[name] for name in wanted.sources
        }
        self.sourced = dataclasses.replace(self.sourced, config=config, sources=sources)
        for apply in dict.fromkeys(self._apply[name] for name in applied):
            apply(config)
        self.applied_total += 1
        self._degraded.clear("reload_refused")
        for change in changes:
            log.info("config_changed", field=change.name, applied=change.applied)
        log.info(
            "reloaded", applied=len(applied), after_restart=sum(not change.applied for change in changes)
        )
        return changes

    def _plan(self, wanted: Config, later: tuple[str, ...] = ()) -> tuple[list[Change], dict[str, Any]]:
        """What changes, and the values that hold from now on. `later`: fields that wait for a restart."""
        changes: list[Change] = []
        applied: dict[str, Any] = {}
        for about in dataclasses.fields(Config):
            name, show = about.name, about.metadata["show"]
            before, after = getattr(self.config, name), getattr(wanted, name)
            if before == after:
                continue
            now = self._part[name](before, after) if name in self._part and name not in later else before
            if now != before:
                applied[name] = now
                changes.append(Change(name, show(before), show(now), True))
            if now != after:
                changes.append(Change(name, show(now), show(after), False))
        return changes, applied
