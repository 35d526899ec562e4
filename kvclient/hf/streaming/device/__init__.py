"""A model that computes on a GPU while most of its weights lie in the host's memory.

    model = StreamingCausalLM.from_pretrained(directory, StreamingConfig(device="cuda", memory=8 << 30))

Owns that memory, the device's slots and the copies between them, and what the host computes meanwhile. Never
writes a file. Invariant: logits have the bits of the model that lies on the device whole, but for layers that
the host computes, which have those of native/cpu.
"""

from kvclient.hf.streaming.device.loading import assemble, load
from kvclient.hf.streaming.device.mover import DeviceMover
from kvclient.hf.streaming.device.runtime import Cuda
from kvclient.hf.streaming.device.streams import DeviceStreams

__all__ = ["Cuda", "DeviceMover", "DeviceStreams", "assemble", "load"]
