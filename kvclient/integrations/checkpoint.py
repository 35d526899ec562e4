"""The digest of a model's files: what makes two checkpoints of one name different.

Owns which files count and how they are read; never looks inside one. Invariant: a byte changed in any
counted file, or a file more or fewer, changes the digest; the directory's name does not.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvclient.errors import InvalidArgument

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DESCRIPTIONS = (".json", ".py")  # config, quantization, code that comes with the checkpoint
MAX_FILES = 4096
THREADS = 4


def checkpoint_digest(directory: str | Path) -> bytes:
    """SHA-256 over all bytes of the weights and descriptions in a directory: reads everything once.
    Raises InvalidArgument that says what is missing."""
    root = Path(directory)
    if not root.is_dir():
        raise InvalidArgument(f"{root} is no directory of a model; the digest of its weights cannot be made")
    wanted = (*WEIGHTS, *DESCRIPTIONS)
    files = sorted(path for path in root.rglob("*") if path.suffix in wanted and path.is_file())
    if not any(path.suffix in WEIGHTS for path in files):
        raise InvalidArgument(f"{root} has no file of weights ({', '.join(WEIGHTS)})")
    if len(files) > MAX_FILES:
        raise InvalidArgument(f"{root} has {len(files)} files; a checkpoint has at most {MAX_FILES}")
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(_of_file, files))
    whole = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        name = str(path.relative_to(root)).encode()
        whole.update(len(name).to_bytes(4, "little") + name + digest)
    return whole.digest()


def _of_file(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
