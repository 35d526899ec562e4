"""What a call of generate() took, by what the kernel or the device says anyway.

Owns two readings of the process's memory and what follows from them. Never resets a peak: who else reads it
has it. Invariant: a figure is said only where the highest that was ever held rose meanwhile, so it is the
call's, or of somebody who took memory at the same time: it may be too much, and where it is none, nothing was
learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kvclient.hf.streaming.device import DeviceStreams
from kvclient.hf.streaming.device.runtime import Reading
from kvclient.hf.streaming.frame import PLANNED_ROWS
from kvclient.hf.streaming.registry import streams_of

STATUS = Path("/proc/self/status")
NAMES = ("VmRSS", "VmHWM", "RssFile", "RssShmem")


def of_process() -> Reading | None:
    """None: a system that does not say so."""
    try:
        lines = (line.split(":", 1) for line in STATUS.read_text().splitlines())
        found = {name: int(value.split()[0]) << 10 for name, value in lines if name in NAMES}
        return Reading(found["VmRSS"], found["VmHWM"], found["RssFile"] + found["RssShmem"])
    except (OSError, ValueError, KeyError, IndexError):
        return None


class Gauge:
    """Of one call, from now on. read: a Reading; to_come: bytes that are counted as held already and are not
    there yet.
    """

    def __init__(self, read: Callable[[], Reading | None], to_come: int) -> None:
        self._read, self._to_come, self._before = read, to_come, read()

    def taken(self) -> int | None:
        """Bytes above what was held, or was to come; None: nobody knows."""
        if self._before is None or (now := self._read()) is None or now.peak <= self._before.peak:
            return None
        files = max(0, now.files - self._before.files)
        return now.peak - self._before.held - files - self._to_come


def gauge_of(model: torch.nn.Module) -> Gauge:
    """For the model's next call."""
    streams = streams_of(model)
    if isinstance(streams, DeviceStreams):
        return Gauge(streams.runtime.reading, 0)
    if streams is None:
        return Gauge(of_process, 0)
    return Gauge(of_process, streams.left() + (PLANNED_ROWS if streams.embedding is not None else 0))


def most_of(model: torch.nn.Module, before: Gauge) -> int | None:
    """The most bytes that the model took: of its device, or of this process since `before`, which is a gauge
    of it from before the model was loaded, without pages of files; None: nobody knows.
    """
    streams = streams_of(model)
    return streams.runtime.reading().peak if isinstance(streams, DeviceStreams) else before.taken()
