"""The example model as llama.cpp reads it, in fp32: what its GGUF file of four bits says, dequantised.

Owns that file. Never reads the model's directory: transformers made that from the same GGUF file, so the
weights are the same numbers. Invariant: the file appears under its name only whole.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def in_fp32(model: Path, folder: Path) -> Path | None:
    """The file, made in `folder` if it is not there (540 MB). None: this directory is not the example
    model's."""
    sys.path[:0] = [str(ROOT / "examples")]
    import model as example

    if model.resolve() != (example.cache_root() / example.NAME).resolve():
        return None
    made = folder / f"{example.NAME}-F32.gguf"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            dequantised(example._gguf(Path(scratch)), Path(scratch) / made.name)
            os.rename(Path(scratch) / made.name, made)
    return made


def dequantised(source: Path, target: Path) -> None:
    """Every tensor in fp32, everything else as it stands."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
