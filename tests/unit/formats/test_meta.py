"""The meta area: what pack makes unpack reads, nothing else, and the native writer makes the same bytes.

Method: round trips and damaged bytes under Hypothesis; one block put by chain through a real daemon.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvclient
from kvclient.blocks import meta

IDENTITY = bytes(range(32))


@pytest.mark.parametrize("identity", [b"", IDENTITY])
@pytest.mark.parametrize("extra_words", [0, 1, 4])
def test_round_trip(extra_words, identity):
    made = meta.Meta(b"p" * 32, b"c" * 32, bytes(4 * 5), bytes([7]) * (8 * 5 * extra_words), identity)
    assert meta.unpack(meta.pack(made) + bytes(100), 5) == made


def test_a_short_block_has_no_room_for_the_identity():
    made = meta.Meta(b"p" * 32, b"c" * 32, bytes(4 * 2), b"", IDENTITY)
    whole = len(meta.pack(made))
    for room, found in ((whole, made), (whole - 1, made._replace(identity=b""))):
        area = bytearray(b"\xff" * room)
        meta.put(memoryview(area), made)
        assert meta.unpack(area, 2) == found


@given(st.binary(max_size=200), st.integers(0, 20))
def test_garbage_is_no_meta(area, tokens):
    found = meta.unpack(area, tokens)
    assert found is None or area[:4] == b"KVM1"


@given(st.integers(0, 79), st.integers(1, 255))
def test_a_damaged_head_is_no_meta_or_says_what_it_holds(at, flip):
    packed = bytearray(meta.pack(meta.Meta(b"p" * 32, b"c" * 32, bytes(4 * 5), b"")))
    packed[at] ^= flip
    assert meta.unpack(packed, 5) is None or at >= 16


def test_a_block_put_by_chain_carries_it(daemon):
    served = daemon(memory="64MiB")
    client = kvclient.connect(served.dir)
    layout = client.register_layout(kvclient.Layout(1, 1, 8, "uint8", 16))
    chain = kvclient.chain(IDENTITY, list(range(40)), 16, extra_ids=[0] * 20 + [9] * 20)
    with client.create(chain, layout) as writer:
        writer.seal(zero_rest=True)
    with client.get(chain) as blocks:
        first, second = (meta.unpack(block.meta, 16) for block in blocks)
    ids = bytes(chain.token_ids.cast("B"))
    assert first == meta.Meta(meta.NO_PARENT, chain.content_keys[0], ids[:64], b"", IDENTITY)
    assert second.parent_key == chain.keys[0]
    assert second.content_key == chain.content_keys[1]
    assert second.identity == b""  # extra ids left no room for it
    assert second.extra_ids == b"".join(i.to_bytes(8, "little") for i in [0] * 4 + [9] * 12)
    client.close()
