"""Whether a model has passed calibration, kept in the user's cache directory.

Owns the file: one per reuse identity without its salt, `calibration/<64 hex>.json`. Never measures (verify
does). Invariant: a file that is damaged, of another version or of another identity counts as none, so
approximate reuse stays off.

    {"version": 3, "identity": "<hex>", "method": "cacheblend", "ratio": 0.05, "max_kl": 5e-3, "caution": 1.0,
     "mean_kl": 2e-3, "top1": 0.98}

Of what was measured all else is Repair's default: raise the version when one of those changes, or what is
estimated (kvclient.hf.reuse.estimate).
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from kvclient.errors import InvalidArgument
from kvclient.hf.reuse.quality.verify import Outcome
from kvclient.hf.reuse.repair import Repair

VERSION = 3
MAX_BYTES = 4096


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
        if kept["version"] != VERSION or kept["identity"] != identity.hex():
            return None
        max_kl, caution = float(kept["max_kl"]), float(kept["caution"])
        return Repair(str(kept["method"]), ratio=float(kept["ratio"]), max_kl=max_kl, caution=caution)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidArgument):
        return None


def cautious(wanted: Repair, identity: bytes) -> Repair:
    """A repair that somebody asked for, with the caution that this model was found to need for a promise."""
    found = load(identity) if wanted.promises else None
    if found is None or not found.promises:
        return wanted
    return dataclasses.replace(wanted, caution=max(wanted.caution, found.caution))


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


def forget(identity: bytes) -> None:
    """The model's calibration is made anew next time."""
    _path(identity).unlink(missing_ok=True)


def _path(identity: bytes) -> Path:
    return directory() / f"{identity.hex()}.json"
