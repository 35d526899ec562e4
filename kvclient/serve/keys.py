"""API keys: where they stand, which of them is shown, and under which salt the KV of each lies.

Owns the form of a key file and the comparison. Never logs or tells a key. Invariants: a key is compared with
all keys in constant time, as bytes; a program that was told of keys has at least one, for without any
everybody may ask.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

SCHEME = b"bearer"
OF_THIS_PROCESS = secrets.token_bytes(32)


def in_file(path: Path) -> list[bytes]:
    """One key a line, of any characters, without the white space around it; empty lines and lines that begin
    with # are none. Raises OSError, and ValueError where there is no key.
    """
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    keys = [key for line in lines if (key := line.strip()) and not key.startswith(b"#")]
    if not keys:
        raise ValueError(f"{path} has no key; everybody could ask")
    return keys


def on_command_line(words: Iterable[str]) -> list[bytes]:
    """The same of flags. Raises ValueError for one that is empty, which everybody has."""
    keys = [os.fsencode(word.strip()) for word in words]
    if not all(keys):
        raise ValueError("a key is empty; everybody could ask")
    return keys


class Keys:
    """Of one server; none: everybody may ask, and shares KV."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._salts = {_digest(key): _salt(key) for key in keys}

    def salt_of(self, authorization: bytes | None, plain: bytes | None = None) -> bytes | None:
        """What a key's KV is under; None: it is no key. authorization: a header `Bearer KEY`, the scheme in
        any case, or the key alone; plain: where there is none, a header with a key. Compares with all keys,
        whatever their lengths are: digests of them.
        """
        if not self._salts:
            return b""
        shown = _digest(plain or b"" if not authorization else _behind_scheme(authorization))
        matched = [salt for known, salt in self._salts.items() if hmac.compare_digest(known, shown)]
        return matched[0] if matched else None


def _behind_scheme(authorization: bytes) -> bytes:
    scheme, _, rest = authorization.strip().partition(b" ")
    return rest.strip() if scheme.lower() == SCHEME else authorization.strip()


def _salt(key: bytes) -> bytes:
    return hashlib.sha256(b"kvclient-serve key\0" + key).digest()


def _digest(shown: bytes) -> bytes:
    """To compare by; keyed anew in each process, so that nobody can look for one that is alike."""
    return hmac.digest(OF_THIS_PROCESS, shown, "sha256")
