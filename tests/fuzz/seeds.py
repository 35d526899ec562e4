"""The fuzzers' first inputs, made from good messages: `python -m tests.fuzz.seeds DIRECTORY` fills one folder
per target. Owns no format: the block's file is the golden one, the rest is packed as docs/formats.md says.
"""

import os
import struct
import sys
from pathlib import Path

from google.protobuf import message_factory

from kvstored.v1 import store_pb2
from tests.golden import reference_block_file as reference
from tests.hostile import raw


def headers() -> list[bytes]:
    found = [reference.GOLDEN.read_bytes()[:4096]]
    for tokens, sizes in ((1, (8,)), (16, (48,) * 32), (3, tuple(range(1, 40)))):
        found.append(reference.block(1, tokens, sizes)[1][:4096])
    return [page + tail for page in found for tail in (b"", b"\x00\x00", b"\x01\x01")]


def layouts() -> list[bytes]:
    return [reference.layout_blob(sizes) for sizes in ((8,), (48, 96, 48), (4096,) * 64, tuple(range(1, 40)))]


def metas() -> list[bytes]:
    head = struct.Struct("<4sIII32s32s")
    return [
        head.pack(b"KVM1", tokens, words, 0, bytes(32), bytes(range(32))) + bytes(tokens * (4 + 8 * words))
        for tokens, words in ((0, 0), (1, 0), (5, 1), (3, 4))
    ]


def conversations() -> list[bytes]:
    """Packets that a good client sends, alone and one after the other."""
    keys = [bytes([number]) * 32 for number in range(3)]
    handle = raw.block_item(0, 1)
    packets = [
        raw.request(raw.REGISTER_LAYOUT, 0, layouts()[0]),
        raw.request(raw.CREATE, 3, raw.create_body(keys, 0)),
        raw.request(raw.CREATE, 1, raw.create_body(keys[:1], 0, (handle,))),
        raw.request(raw.SEAL, 1, handle),
        raw.request(raw.ABORT, 1, handle),
        raw.request(raw.LOOK_UP, 3, b"".join(keys)),
        raw.request(raw.DELETE, 3, b"".join(keys)),
        raw.request(raw.TOUCH, 3, b"".join(keys)),
        raw.request(raw.PROMOTE_FROM, 3, raw.promote_from_body(keys, b"a")),
        raw.request(raw.STATS, 0),
        raw.request(raw.ATTACH, 1, raw.attach_body()),
    ]
    framed = [struct.pack("<H", len(packet)) + packet for packet in packets]
    return [*framed, b"".join(framed[:4]), b"".join(framed[:9])]


def requests() -> list[bytes]:
    """Each method of the Store service with every field filled; the method is the first byte."""
    found = []
    methods = store_pb2.DESCRIPTOR.services_by_name["Store"].methods
    for number, method in enumerate(methods):
        message = message_factory.GetMessageClass(method.input_type)()
        for field in method.input_type.fields:
            if field.message_type is not None:
                continue
            value = {field.CPPTYPE_STRING: "default", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 1)
            if field.type == field.TYPE_BYTES:
                value = bytes(range(32)) if field.name.startswith("key") else layouts()[0]
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        found.append(bytes([number]) + message.SerializeToString())
    return found


def answers() -> list[bytes]:
    """What a peer answers for two keys, in the short form of native/fuzz/frames_fuzz.cc: a whole block
    and none; the same of one who places it himself, rightly, wrongly, and late."""

    def said(*frames: tuple[int, int, int, int]) -> bytes:
        return b"".join(struct.pack("<BBBBH", *frame, 0) for frame in frames)

    layout, head, meta, offer = (7, 0, 0, 3), (8, 0, 0, 3), (9, 0, 0, 1), (20, 0, 0, 3)
    layers = [(10, 0, layer, 1) for layer in range(3)]
    whole, placed, lost, none = (11, 0, 0, 0), (22, 0, 0, 0), (13, 0, 0, 0), (12, 1, 0, 0)
    return [
        b"\1" + said(layout, head, meta, *layers, whole, none),
        b"\3" + said(layout, head, offer, placed, none),
        b"\3" + said(layout, head, (20, 0, 0, 1), placed, meta, *layers, whole, none),
        b"\3" + said(layout, head, offer, meta, *layers, whole, none),
        b"\3" + said(layout, head, offer, lost, none),
    ]


def write(directory: Path, inputs: list[bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs):
        (directory / f"seed-{number}").write_bytes(data)


def main() -> int:
    home = Path(sys.argv[1])
    write(home / "header_fuzz", headers())
    write(home / "layout_fuzz", layouts())
    write(home / "session_fuzz", conversations())
    write(home / "frames_fuzz", answers())
    write(home / "blobs_fuzz", [b"\0" + blob for blob in layouts()] + [b"\1" + area for area in metas()])
    write(home / "requests_fuzz", requests())
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
