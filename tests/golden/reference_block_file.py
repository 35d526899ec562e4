"""A block's file in plain Python, slow and obvious: a second opinion on native/core/files/block_file.cc.

Goal: someone who wants to read a block from a disk without this project can see here how (docs/formats.md,
sections 2, 3 and 6). `python -m tests.golden.reference_block_file` writes tests/golden/block_file.bin anew.
"""

import struct
from hashlib import sha256
from pathlib import Path

GOLDEN = Path(__file__).with_name("block_file.bin")
HEADER_BYTES = 4096
HEAD = struct.Struct("<8sII32s32s32s32sQQIIIIIIII")  # up to tail_checksum
FIELDS = (
    "magic", "version", "header_bytes", "key", "content_key", "identity", "layout", "fingerprint",
    "data_bytes", "tokens", "base_position", "priority", "parent", "created_s", "expiry_s", "layers",
    "tail_checksum",
)  # fmt: skip
TABLE = [0] * 256
for byte in range(256):
    value = byte
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    TABLE[byte] = value


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def padded(data, to):
    return data + bytes(-len(data) % to)


def layout_blob(layer_sizes, meta_fixed=80, meta_per_token=4, block_tokens=16):
    head = (len(layer_sizes), 2, 2, 4, 0, block_tokens, 0, meta_fixed, meta_per_token)
    return b"KVL1" + struct.pack(f"<9I{len(layer_sizes)}I", *head, *layer_sizes)


def extent(layers, meta):
    """Section 2: layers, their checksums, the meta area."""
    sums = struct.pack(f"<{len(layers)}I", *map(crc32c, layers))
    return padded(b"".join(padded(layer, 512) for layer in layers) + padded(sums, 512) + meta, 4096)


def header(data, layers, layer_sizes, **fields):
    """Section 6. `layers` are the bytes of each layer, `layer_sizes` those of a token."""
    sizes = list(dict.fromkeys(layer_sizes))
    behind = sum(len(padded(layer, 512)) for layer in layers)
    values = {
        "magic": b"KVBLOCK1", "version": 1, "header_bytes": HEADER_BYTES, "data_bytes": len(data),
        "layers": len(layers), "tail_checksum": crc32c(data[behind:]), **fields,
    }  # fmt: skip
    page = HEAD.pack(*(values[name] for name in FIELDS))
    page += struct.pack("<512I", *map(crc32c, layers), *[0] * (512 - len(layers)))
    page += struct.pack("<256I", *sizes, *[0] * (256 - len(sizes)))
    page += bytes(map(sizes.index, layer_sizes)) + bytes(512 - len(layers))
    page += bytes(HEADER_BYTES - 4 - len(page))
    return sealed(page)


def sealed(page):
    """A header's bytes with the checksum they need."""
    page = page[: HEADER_BYTES - 4]
    return page + struct.pack("<I", crc32c(page))


def read(file):
    """The header's fields and the layers' bytes. Asserts whatever a reader must check."""
    page, data = file[:HEADER_BYTES], file[HEADER_BYTES:]
    fields = dict(zip(FIELDS, HEAD.unpack_from(page), strict=True))
    assert (fields["magic"], fields["version"], fields["header_bytes"]) == (b"KVBLOCK1", 1, HEADER_BYTES)
    assert struct.unpack_from("<I", page, 4092)[0] == crc32c(page[:4092])
    assert fields["data_bytes"] == len(data)
    count = fields["layers"]
    sums = struct.unpack_from(f"<{count}I", page, 192)
    sizes = [struct.unpack_from("<I", page, 2240 + 4 * page[3264 + layer])[0] for layer in range(count)]
    layers, at = [], 0
    for size, checksum in zip(sizes, sums, strict=True):
        layers.append(data[at : at + size * fields["tokens"]])
        assert crc32c(layers[-1]) == checksum
        at += len(padded(layers[-1], 512))
    assert crc32c(data[at:]) == fields["tail_checksum"]
    return fields, layers


def block(number=1, tokens=5, layer_sizes=(48, 96, 48), **fields):
    """A good file of a made-up block, and its key."""
    key = sha256(b"key %d" % number).digest()
    layers = [
        bytes((number + 31 * layer + at) % 251 for at in range(size * tokens))
        for layer, size in enumerate(layer_sizes)
    ]
    meta = struct.pack("<4sIII", b"KVM1", tokens, 0, 0) + sha256(b"parent").digest()
    meta += sha256(b"content %d" % number).digest() + struct.pack(f"<{tokens}i", *range(tokens))
    data = extent(layers, meta)
    values = {
        "key": key, "content_key": sha256(b"content %d" % number).digest(),
        "identity": sha256(b"model").digest(), "layout": sha256(layout_blob(layer_sizes)).digest(),
        "fingerprint": 0x123456789ABCDEF, "tokens": tokens, "base_position": 16, "priority": 35,
        "parent": 0x89ABCDEF, "created_s": 1_700_000_000, "expiry_s": 0, **fields,
    }  # fmt: skip
    return key, header(data, layers, layer_sizes, **values) + data


if __name__ == "__main__":
    GOLDEN.write_bytes(block()[1])
