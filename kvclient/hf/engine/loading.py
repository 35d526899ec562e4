"""A model and its tokenizer by name, from a directory, a .gguf file or the hub.

Owns which of transformers' loaders is called, and with what. Never attaches anything. Invariant: what is
wrong with the arguments is said before weights are read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.files.checkpoint import directory_of


def load(
    name_or_path: str | os.PathLike[str], dtype: str | torch.dtype, device: str | None,
    gguf_file: str | None, streaming: StreamingConfig | None,
) -> tuple[torch.nn.Module, Any]:  # fmt: skip
    """(model, tokenizer); see Engine.from_pretrained. Raises InvalidArgument for a dtype that is none, a
    device that is not there, and for streaming of another file or to another device.
    """
    options: dict[str, Any] = {}
    if gguf_file is None and str(name_or_path).endswith(".gguf"):
        path = Path(name_or_path)
        name_or_path, gguf_file = path.parent, path.name
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    if streaming is None:
        device = device and chosen_device(device)
        with read_once() if options else contextlib.nullcontext():
            tokenizer = transformers.AutoTokenizer.from_pretrained(name_or_path, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype, **options)
        model = model.eval()
        return (model.to(device) if device else model), tokenizer
    if options:
        raise InvalidArgument(f"gguf_file={gguf_file!r}; streaming takes a directory of safetensors")
    if device not in (None, "auto", streaming.device):
        told = f"it computes on {streaming.device!r}, which StreamingConfig(device=) says"
        raise InvalidArgument(f"device={device!r} of a streamed model; {told}")
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not isinstance(wanted, torch.dtype):
        raise InvalidArgument(f"dtype={dtype!r}; it must be a dtype of torch, or auto")
    home = directory_of(os.fspath(name_or_path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    return StreamingCausalLM.from_pretrained(home, streaming, dtype=wanted), tokenizer


_reading = threading.Lock()


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Within it, a .gguf file is read once: its configuration, its tokenizer and its weights would each read
    all of its words, in Python, and each number of them as a file of its own. One thread at a time.
    """
    try:
        import gguf
    except ModuleNotFoundError:  # transformers says so
        yield
        return

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray:
            """The file, as an array like any other: a slice of it takes a third of the time."""
            return self._array

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._array = mapped.view(np.ndarray)

    made: dict[str, Any] = {}

    def reader(path: str | os.PathLike[str], mode: str = "r") -> Any:
        if mode != "r":
            return Reader(path, mode)
        if (name := os.path.realpath(path)) not in made:
            made[name] = Reader(path)
        return made[name]

    with _reading:
        before, gguf.GGUFReader = gguf.GGUFReader, reader
        try:
            yield
        finally:
            gguf.GGUFReader = before


def chosen_device(device: str) -> str:
    """A device as torch names it; of "auto" the accelerator that is there, or else the CPU. Raises
    InvalidArgument for one that is not there.
    """
    if device == "auto":  # torch names the one it was built for, whether there is such a device or not
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the second by a torch without CUDA
        raise InvalidArgument(f"device={device!r}: {str(error).partition(chr(10))[0]}") from error
    return device
