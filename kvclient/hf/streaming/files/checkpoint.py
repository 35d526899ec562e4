"""Where a checkpoint lies: a directory, or a hub id that was or can be fetched.

Owns the look into the hub's cache, and the download where there is none. Never believes a name that is
neither. Invariant: what is returned is a directory with a config.json.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvclient.errors import InvalidArgument

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # of a repository: never pickles


def directory_of(name: str | Path) -> Path:
    """Raises InvalidArgument that says what to do."""
    home = Path(name)
    if (home / "config.json").is_file():
        return home
    if home.exists() or not isinstance(name, str) or not HUB_ID.fullmatch(name):
        raise InvalidArgument(f"{home} is no directory with a config.json, and no hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if (found := fetched(name)) is not None:
        return found
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidArgument(
            f"{name} is no directory, and the hub cannot be asked ({why[:160]}); it must be fetched first: "
            f"where there is a network, `hf download {name} --local-dir DIR`, and pass DIR"
        ) from error


def fetched(name: str | Path) -> Path | None:
    """A directory, or what the hub's cache has of an id; None: neither. Nothing is asked."""
    home = Path(name)
    if (home / "config.json").is_file():
        return home
    if home.exists() or not HUB_ID.fullmatch(str(name)):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(str(name), allow_patterns=list(FILES), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):  # as of a--b/c, which no hub has
        return None
    return found if _whole(found) else None


def _whole(home: Path) -> bool:
    """A snapshot of which only some files were fetched has no weights."""
    return (home / "config.json").is_file() and any(home.glob("*.safetensors"))
