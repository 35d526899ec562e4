"""The digest of a model's files: what makes two checkpoints of one name different.

Owns which files count, where a name's files lie and how they are read; never looks inside one. Invariant: a
byte changed in any counted file, or a file more or fewer, changes the digest; the directory's name does not.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvclient.errors import InvalidArgument

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt", ".engine", ".tensors")
UNCOUNTED = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".lock")  # what no engine reads
MAX_FILES = 4096
THREADS = 4


def checkpoint_digest(place: str | Path) -> bytes:
    """SHA-256 over all bytes of a directory's files, or of one file of weights: reads everything once. Hidden
    files, pictures and texts about the model do not count. Raises InvalidArgument that says what is missing.
    """
    root = Path(place)
    if not root.exists():
        raise InvalidArgument(f"{root} is no directory of a model; the digest of its weights cannot be made")
    if not any(path.suffix in WEIGHTS for path in _files(root)):
        raise InvalidArgument(f"{root} has no file of weights ({', '.join(WEIGHTS)})")
    return content_digest(root)


def content_digest(place: str | Path) -> bytes:
    """The same of what need not have weights: a table, a file of scales. Raises InvalidArgument."""
    root = Path(place)
    files = _files(root)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(_of_file, files))
    except OSError as error:
        raise InvalidArgument(f"{root} cannot be read: {error}") from error
    whole = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        name = b"" if path == root else str(path.relative_to(root)).encode(errors="surrogateescape")
        whole.update(len(name).to_bytes(4, "little") + name + digest)
    return whole.digest()


def located(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Where the files of a model lie: a place, or a hub's name that is on this machine, in its download_dir
    where it has one: another cache may have the same name's weights of another day. Raises InvalidArgument.
    """
    path = Path(name)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        raise InvalidArgument(f"the files of model {name!r} are not on this machine ({error})") from error


def _files(root: Path) -> list[Path]:
    """Sorted by path; links are followed, and a loop of them ends at MAX_FILES."""
    if root.is_file():
        return [root]
    found = []

    def unreadable(error: OSError) -> None:
        raise InvalidArgument(f"{root} cannot be read: {error}") from error

    for place, directories, names in os.walk(root, onerror=unreadable, followlinks=True):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        counted = (n for n in names if not n.startswith(".") and not n.lower().endswith(UNCOUNTED))
        found += [path for name in counted if (path := Path(place, name)).is_file()]
        if len(found) > MAX_FILES:
            raise InvalidArgument(f"{root} has over {MAX_FILES} files; a checkpoint has at most {MAX_FILES}")
    return sorted(found)


def _of_file(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
