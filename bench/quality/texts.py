"""Texts that belong to nobody here: manuals, licences and code that the machine has installed.

Owns where they come from, how they are split into a tuning and a reporting half, and the digest of what was
found. Never reads this project's own documents. Invariant: which half a file is in hangs on its name and SEED
alone, so a file more or less moves no other, and the reporting half is not read while tuning.
"""

from __future__ import annotations

import gzip
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 21
HALVES = ("tuning", "reporting")
LEAST_BYTES, MOST_BYTES = 9_000, 60_000  # a shorter file is left out, of a longer one this much is read
LICENCES = Path("/usr/share/common-licenses")  # Debian's base-files
# Debian's vim-runtime, perl-modules and whatever brought a NEWS file.
MANUALS = (
    ("/usr/share/vim", "vim*/doc/*.txt"),
    ("/usr/share/perl", "[0-9]*.[0-9]*.[0-9]*/**/*.pod"),
    ("/usr/share/doc", "*/NEWS.gz"),
)


@dataclass(frozen=True)
class Text:
    kind: str  # "code", "licence" or "manual"
    name: str
    text: str


def found(half: str) -> list[Text]:
    """All texts of that half, ordered by name. Raises SystemExit where a kind is missing."""
    if half not in HALVES:
        raise ValueError(f"half={half!r}; it must be one of {', '.join(HALVES)}")
    every, bodies = [], set()
    for kind, name, path in _files():
        if half_of(name) != half or (text := _read(path)) is None:
            continue
        body = hashlib.sha256(text.encode()).digest()
        if body not in bodies:  # one file under two names
            bodies.add(body)
            every.append(Text(kind, name, text))
    if missing := {"code", "licence", "manual"} - {text.kind for text in every}:
        raise SystemExit(
            f"no {', '.join(sorted(missing))} found: Debian's base-files and vim-runtime bring them"
        )
    return every


def half_of(name: str) -> str:
    """Which half a file of that name is in."""
    return HALVES[hashlib.sha256(f"{SEED} {name}".encode()).digest()[0] & 1]


def digest(texts: list[Text]) -> str:
    """Of names and contents: two runs with the same digest read the same."""
    whole = hashlib.sha256()
    for text in texts:
        whole.update(f"{text.kind} {text.name}\0{text.text}\0".encode())
    return whole.hexdigest()[:16]


def _files() -> Iterator[tuple[str, str, Path]]:
    """(kind, a name without this machine's directories, where it is)."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if path.parent.name not in ("site-packages", "test", "idlelib", "lib2to3"):
            yield "code", f"python/{path.relative_to(library)}", path
    for path in sorted(LICENCES.glob("*")):
        if not path.is_symlink():
            yield "licence", f"licence/{path.name}", path
    for root, pattern in MANUALS:
        for path in sorted(Path(root).glob(pattern)):
            if not path.is_symlink() and not path.parent.is_symlink():
                yield "manual", str(path.relative_to(root)), path


def _read(path: Path) -> str | None:
    """Its first MOST_BYTES; None: too short, or no text."""
    opened: Callable[..., object] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:  # type: ignore[attr-defined]
            text = file.read(MOST_BYTES)
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) >= LEAST_BYTES else None
