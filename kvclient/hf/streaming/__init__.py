"""Models larger than their memory: layers read from disk into a few slots while others compute.

    model = StreamingCausalLM.from_pretrained(directory, StreamingConfig(memory=2 << 30))
    model.generate(...)  # and attach(), Engine: it is the stock model

Owns where each layer's weights lie and when they are read. Never changes what a layer computes. Invariant:
logits have the same bits for every residency, as long as the same processor computes each layer.
"""

from kvclient.hf.streaming.model import (
    StreamingCausalLM,
    close_streams,
    expected_s,
    streaming_stats,
    write_trace,
)
from kvclient.hf.streaming.mover import DiskMover, MemoryMover, StreamingFailed, host_memory
from kvclient.hf.streaming.planner.admission import Admission, Estimate, RequestTooLarge
from kvclient.hf.streaming.residency import StreamingConfig

__all__ = [
    "Admission",
    "DiskMover",
    "Estimate",
    "MemoryMover",
    "RequestTooLarge",
    "StreamingCausalLM",
    "StreamingConfig",
    "StreamingFailed",
    "close_streams",
    "expected_s",
    "host_memory",
    "streaming_stats",
    "write_trace",
]
