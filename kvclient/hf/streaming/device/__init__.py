"""A model that computes on a GPU while most of its weights lie in the host's memory.

    model = StreamingCausalLM.from_pretrained(directory, StreamingConfig(device="cuda", memory=8 << 30))

Owns that memory, the device's slots and the copies between them. Never writes a file: the checkpoint is read
once. Invariant: logits have the bits of the model that lies on the device whole.
"""

from kvclient.hf.streaming.device.loading import assemble, load
from kvclient.hf.streaming.device.mover import DeviceMover
from kvclient.hf.streaming.device.runtime import Cuda
from kvclient.hf.streaming.device.streams import DeviceStreams

__all__ = ["Cuda", "DeviceMover", "DeviceStreams", "assemble", "load"]
