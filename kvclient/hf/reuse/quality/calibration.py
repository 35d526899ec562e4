"""Whether a model has passed calibration, kept in the user's cache directory.

Owns the file: one per reuse identity without its salt, `calibration/<64 hex>.json`, and what is known of
models without one. Never measures (verify does). Invariant: a file that is damaged, of another version or of
another identity counts as none, so approximate reuse stays off.

    {"version": 3, "identity": "<hex>", "method": "cacheblend", "ratio": 0.05, "max_kl": 5e-3, "caution": 1.0,
     "mean_kl": 2e-3, "top1": 0.98}

Of what was measured all else is Repair's default: raise the version when one of those changes, or what is
estimated (kvclient.hf.reuse.estimate).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from pathlib import Path

from kvclient.errors import InvalidArgument
from kvclient.hf.reuse.quality.verify import Outcome
from kvclient.hf.reuse.repair import Repair

VERSION = 3
MAX_BYTES = 4096
# Weights (kvclient.hf.model.identity.digest_weights) that bench.quality measured the promise on: with blocks
# as computed, theirs is as good as a calibration.
KNOWN = {
    # SmolLM2-135M-Instruct of examples/model.py: float32, whose texts the estimate was tuned on, and bfloat16
    "f1c61ee4ee9e461345c5fba23b52c3fa87799f40cff61eeaa40a4d6ea62755d6": Repair(caution=1.0),
    "c6b46a9cfea2266c073996f47978e5e5110da71bf80fb6d940bf037410bc8a81": Repair(caution=1.0),
}

log = logging.getLogger("kvclient.hf")


def directory() -> Path:
    """$KVCLIENT_CALIBRATION_DIR, else kvstored/calibration in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("KVCLIENT_CALIBRATION_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvstored" / "calibration"


def load(identity: bytes) -> Repair | None:
    """The repair this model has passed with, if it has."""
    try:
        with open(_path(identity), encoding="utf-8") as file:
            kept = json.loads(file.read(MAX_BYTES))
        if kept["version"] != VERSION:
            _outdated(_path(identity), str(kept["version"])[:16])
            return None
        if kept["identity"] != identity.hex():
            return None
        max_kl, caution = float(kept["max_kl"]), kept["caution"]
        return Repair(str(kept["method"]), ratio=float(kept["ratio"]), max_kl=max_kl, caution=caution)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidArgument):
        return None


def cautious(wanted: Repair, identity: bytes, known: Repair | None) -> Repair:
    """A repair that somebody asked for, with the caution that this model was found to need for a promise of
    so much, or more. known: what is known of it without a calibration.
    """
    if not wanted.promises:
        return wanted
    found = load(identity)
    found = known if found is None or not found.promises else found
    if found is None or found.promised > wanted.promised:
        return wanted
    return dataclasses.replace(wanted, caution=max(wanted.caution or 1.0, found.caution or 1.0))


def save(identity: bytes, repair: Repair, outcome: Outcome) -> Path:
    """Complete or not at all. The directory is made, readable by its owner only."""
    path = _path(identity)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {
        "version": VERSION,
        "identity": identity.hex(),
        "method": repair.method,
        "ratio": repair.ratio,
        "max_kl": repair.max_kl,
        "caution": repair.caution,
        "mean_kl": outcome.mean_kl,
        "top1": outcome.top1,
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(kept))
    os.replace(temporary, path)
    return path


@functools.cache  # says it once
def _outdated(path: Path, version: str) -> None:
    again = "of another release of kvclient: approximate reuse stays off until calibrate() has passed again"
    log.warning("%s is of version %s, not %s, %s", path, version, VERSION, again)


def forget(identity: bytes) -> None:
    """The model's calibration is made anew next time."""
    _path(identity).unlink(missing_ok=True)


def _path(identity: bytes) -> Path:
    return directory() / f"{identity.hex()}.json"
