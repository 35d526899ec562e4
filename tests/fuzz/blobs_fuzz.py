"""atheris: what the library reads out of a block or a table. A meta area is a Meta or None, a layout's blob a
Layout or InvalidArgument, and what was read is written back as the same bytes. `make fuzz` runs it.
"""

import struct
import sys

import atheris

with atheris.instrument_imports(
    include=["kvclient.blocks.meta", "kvclient.blocks.layout", "kvclient.blocks.layout"]
):
    from kvclient.blocks import meta
    from kvclient.blocks.layout import Layout
    from kvclient.errors import InvalidArgument


def read_meta(data: bytes) -> None:
    tokens = struct.unpack_from("<I", data, 4)[0] & 0xFFFF if len(data) >= 8 else 0
    for count in (tokens, 0, 1):
        found = meta.unpack(data, count)
        if found is not None:
            written = meta.pack(found)
            assert len(found.token_ids) == 4 * count
            assert data[: len(written)] == written or not count


def read_layout(data: bytes) -> None:
    try:
        layout = Layout.from_blob(data)
    except InvalidArgument:
        return
    assert bytes(layout) == data
    for tokens in (1, layout.block_tokens):
        assert layout.block_bytes(tokens) % 4096 == 0
        last = layout.layer_offset(layout.num_layers - 1, tokens)
        assert last + layout.layer_length(layout.num_layers - 1, tokens) <= layout.block_bytes(tokens)


def one(data: bytes) -> None:
    if not data:
        return
    (read_meta if data[0] & 1 else read_layout)(data[1:])


def main() -> None:
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
