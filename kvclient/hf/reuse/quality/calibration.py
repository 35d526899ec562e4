"""What calibrations of a model have found, kept in the user's cache directory.

Owns the file: one per reuse identity without its salt, `calibration/<64 hex>.json`, and what is known of
models without one. Never measures (verify does). Invariants: what was found counts for the rules that it was
measured with, and no others; a file that is damaged, of another version or of another identity counts as
none, so approximate reuse stays off.

    {"version": 6, "identity": "<hex>", "found": [
        {"repair": {"method": "cacheblend", "ratio": 0.05, ...}, "passed": true, "mean_kl": 2e-3, "top1": 1},
        {"repair": {"method": "auto", "max_kl": 5e-3, "caution": 2, ...}, ...}, ...]}

Oldest first; a repair has all its fields. One that promises `max_kl` may have not passed: nothing kept it.
Raise the version when something changes in what a repair does, or in what is estimated
(kvclient.hf.reuse.estimate).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import InvalidArgument
from kvclient.hf.reuse.quality.verify import Outcome
from kvclient.hf.reuse.repair import Repair

VERSION = 6
MAX_BYTES = 64 << 10
MOST_FOUND = 32  # kept of a model: the newest
# Weights (kvclient.hf.model.identity.digest_weights) that bench.quality measured the promise on: with blocks
# as computed, theirs is as good as a calibration.
KNOWN = {
    # SmolLM2-135M-Instruct of examples/model.py: float32, whose texts the estimate was tuned on, and bfloat16
    "f1c61ee4ee9e461345c5fba23b52c3fa87799f40cff61eeaa40a4d6ea62755d6": Repair(caution=1.0),
    "c6b46a9cfea2266c073996f47978e5e5110da71bf80fb6d940bf037410bc8a81": Repair(caution=1.0),
}

log = logging.getLogger("kvclient.hf")


@dataclass(frozen=True)
class Finding:
    """What one calibration said."""

    repair: Repair
    passed: bool
    mean_kl: float
    top1: float


@dataclass(frozen=True)
class Findings:
    """Of one model, oldest first. Without a promise there is one at most, and it has passed. Of promises with
    the same rules, those that were not kept are all for less than those that were."""

    found: tuple[Finding, ...] = ()

    @property
    def switched_on(self) -> Repair | None:
        """What repair="calibrated" is: the newest that has passed."""
        return next((of.repair for of in reversed(self.found) if of.passed), None)

    def cautious(self, wanted: Repair, known: Repair | None) -> Repair:
        """A repair that somebody asked for, with the caution that this model was found to need for a promise
        of so much, or less, by the same rules. known: what is known of the model without a calibration.
        """
        if not wanted.promises:
            return wanted
        same = [of for of in self.found if _same_rules(of.repair, wanted)]
        if any(not of.passed and wanted.promised <= of.repair.promised for of in same):
            return wanted
        kept = [of.repair for of in same if of.passed]
        if known is not None and _same_rules(known, wanted):
            kept = kept or [known]
        enough = [repair for repair in kept if repair.promised <= wanted.promised]
        if not enough:
            return wanted
        nearest = max(enough, key=lambda repair: repair.promised)
        return dataclasses.replace(wanted, caution=max(wanted.caution or 1.0, nearest.caution or 1.0))

    def with_passed(self, repair: Repair, outcome: Outcome) -> Findings:
        """And that this repair has passed."""
        gone = functools.partial(_doubted_by_pass, repair)
        return self._and(Finding(repair, True, outcome.mean_kl, outcome.top1), gone)

    def with_failed(self, repair: Repair, outcome: Outcome) -> Findings:
        """And that none of those like this repair has: without a promise, nothing near enough; with one, no
        caution that keeps it."""
        if not repair.promises:
            return Findings(tuple(of for of in self.found if of.repair.promises))
        gone = functools.partial(_doubted_by_failure, repair)
        return self._and(Finding(repair, False, outcome.mean_kl, outcome.top1), gone)

    def _and(self, new: Finding, gone: Callable[[Finding], bool]) -> Findings:
        kept = [of for of in self.found if not gone(of)]
        return Findings((*kept, new)[-MOST_FOUND:])


def _doubted_by_pass(repair: Repair, of: Finding) -> bool:
    if not repair.promises:
        return not of.repair.promises
    more = of.repair.promises and not of.passed and of.repair.promised > repair.promised
    return _same_rules(of.repair, repair) and (more or of.repair.max_kl == repair.max_kl)


def _doubted_by_failure(repair: Repair, of: Finding) -> bool:
    less = of.repair.promises and of.passed and of.repair.promised < repair.promised
    return _same_rules(of.repair, repair) and (less or of.repair.max_kl == repair.max_kl)


def _same_rules(first: Repair, second: Repair) -> bool:
    """Whether both promise something, and differ in nothing but how much, and with what caution."""
    alike = {"max_kl": 1.0, "caution": None}
    promise = first.promises and second.promises
    return promise and dataclasses.replace(first, **alike) == dataclasses.replace(second, **alike)


def directory() -> Path:
    """$KVCLIENT_CALIBRATION_DIR, else kvstored/calibration in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("KVCLIENT_CALIBRATION_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    homeless = base.startswith("~")  # a user of whom nothing is known, as in a container: nothing is kept
    return Path(os.devnull if homeless else base) / "kvstored" / "calibration"


def load(identity: bytes) -> Findings:
    """What was found of this model."""
    try:
        with open(_path(identity), encoding="utf-8") as file:
            kept = json.loads(file.read(MAX_BYTES))
        if kept["version"] != VERSION:
            _outdated(_path(identity), str(kept["version"])[:16])
            return Findings()
        if kept["identity"] != identity.hex():
            return Findings()
        return Findings(tuple(_read(of) for of in kept["found"])[-MOST_FOUND:])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidArgument):
        return Findings()


def _read(of: Any) -> Finding:
    repair = Repair(**of["repair"])
    if not isinstance(of["passed"], bool) or not (of["passed"] or repair.promises):
        raise ValueError(of["passed"])
    return Finding(repair, of["passed"], float(of["mean_kl"]), float(of["top1"]))


def update(identity: bytes, change: Callable[[Findings], Findings]) -> Findings:
    """Changes what is kept of this model, complete or not at all, to what is returned. The directory is made,
    readable by its owner only. Raises OSError.
    """
    path = _path(identity)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path.parent):
        if not (now := change(load(identity))).found:
            path.unlink(missing_ok=True)
            return now
        found = [dataclasses.asdict(of) for of in now.found]
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"version": VERSION, "identity": identity.hex(), "found": found}))
        os.replace(temporary, path)
        return now


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Within it, no other process has the directory so."""
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@functools.cache  # says it once
def _outdated(path: Path, version: str) -> None:
    again = "of another release of kvclient: approximate reuse stays off until calibrate() has passed again"
    log.warning("%s is of version %s, not %s, %s", path, version, VERSION, again)


def _path(identity: bytes) -> Path:
    return directory() / f"{identity.hex()}.json"
