"""What can be wrong with a block's file: a table of damages by name, each a function of the file's path.

Owns no test: tests/hostile/test_block_files.py tries them on the offline check, the daemon's on the disk
tier. Every damage leaves something that no reader may take for the block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from tests.golden import reference_block_file as reference

Damage = Callable[[Path], None]


def _patched(offset: int, data: bytes, sealed: bool) -> Damage:
    """Overwrites bytes of the header; `sealed`: under a checksum that fits."""

    def damage(path: Path) -> None:
        file = bytearray(path.read_bytes())
        file[offset : offset + len(data)] = data
        if sealed:
            file[:4096] = reference.sealed(bytes(file[:4096]))
        path.write_bytes(file)

    return damage


def _flipped(offset: int) -> Damage:
    def damage(path: Path) -> None:
        file = bytearray(path.read_bytes())
        file[offset] ^= 0x40
        path.write_bytes(file)

    return damage


def _length(size: int) -> Damage:
    return lambda path: os.truncate(path, size)


def _grown(by: int) -> Damage:
    return lambda path: os.truncate(path, path.stat().st_size + by)


def _zeroed(offset: int, size: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(size))

    return damage


def header_damages() -> dict[str, Damage]:
    """A bit of every field; then values out of bounds under a good checksum."""
    damages: dict[str, Damage] = {}
    at = 0
    for name, code in zip(
        reference.FIELDS, reference.HEAD.format[1:].replace("32s", "k").replace("8s", "m"), strict=True
    ):
        damages[f"{name} flipped"] = _flipped(at)
        at += {"k": 32, "m": 8, "I": 4, "Q": 8}[code]
    for name, offset in (("checksums", 192), ("sizes", 2240), ("size index", 3264), ("reserved", 3800),
                         ("header checksum", 4092)):  # fmt: skip
        damages[f"{name} flipped"] = _flipped(offset)
    for name, offset, value in (
        ("magic", 0, b"KVBLOCK2"),
        ("version", 8, struct.pack("<I", 2)),
        ("header bytes", 12, struct.pack("<I", 8192)),
        ("key", 16, bytes(32)),
        ("data bytes 0", 152, struct.pack("<Q", 0)),
        ("data bytes huge", 152, struct.pack("<Q", 2**64 - 4096)),
        ("data bytes of another page", 152, struct.pack("<Q", 1 << 30)),
        ("tokens 0", 160, struct.pack("<I", 0)),
        ("tokens huge", 160, struct.pack("<I", 2**32 - 1)),
        ("tokens longer than the file", 160, struct.pack("<I", 0xFFFFF)),
        ("base position huge", 164, struct.pack("<I", 2**32 - 1)),
        ("priority huge", 168, struct.pack("<I", 101)),
        ("layers 0", 184, struct.pack("<I", 0)),
        ("layers fewer", 184, struct.pack("<I", 1)),
        ("layers more", 184, struct.pack("<I", 512)),
        ("layers huge", 184, struct.pack("<I", 2**32 - 1)),
        ("size 0", 2240, struct.pack("<I", 0)),
        ("size huge", 2240, struct.pack("<I", 2**32 - 1)),
        ("size index beyond", 3264, b"\xff"),
        ("reserved used", 3776, b"\x01"),
    ):
        damages[f"{name}, checksum right"] = _patched(offset, value, sealed=True)
    return damages


def data_damages(layer_starts: list[int], tail: int, size: int) -> dict[str, Damage]:
    """Each layer's first byte, what is behind the layers, and the file cut at each boundary.

    `layer_starts`, `tail` and `size` count from the beginning of the file.
    """
    damages: dict[str, Damage] = {}
    for layer, start in enumerate(layer_starts):
        damages[f"layer {layer} flipped"] = _flipped(start)
        damages[f"layer {layer} zeroed"] = _zeroed(start, 16)
        damages[f"cut before layer {layer}"] = _length(start)
        damages[f"cut in layer {layer}"] = _length(start + 1)
    damages["tail flipped"] = _flipped(tail)
    damages["last byte flipped"] = _flipped(size - 1)
    for cut in (0, 1, 4095, 4096, tail, size - 4096, size - 512, size - 1):
        damages[f"cut to {cut}"] = _length(cut)
    damages["a byte longer"] = _grown(1)
    damages["a page longer"] = _grown(4096)
    damages["a terabyte longer"] = _grown(1 << 40)
    damages["all zeros"] = _zeroed(0, size)
    return damages


def replaced_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_link(path: Path) -> None:
    """To the same bytes elsewhere: what it leads to is not ours to read."""
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def replaced_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def replaced_by_device_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


SPECIAL: dict[str, Damage] = {
    "directory": replaced_by_directory,
    "FIFO": replaced_by_fifo,
    "link": replaced_by_link,
    "dangling link": replaced_by_dangling_link,
    "link to a device": replaced_by_device_link,
}
