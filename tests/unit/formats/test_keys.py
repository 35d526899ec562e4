"""Chains: the native keys equal the published vectors and a plain Python reference; any difference misses.

Method: golden vectors (tests/golden/keys.json), Hypothesis against tests/golden/reference_keys.py, and one
changed dimension at a time.
"""

import array
import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvclient
from kvclient._core import DerivedKeys
from kvclient.blocks.keys import chain, extra_ids_from_digests, root_key, window_fingerprints
from kvclient.errors import InvalidArgument
from tests.golden import reference_keys as reference

IDENTITY = bytes(range(32))
VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "keys.json").read_text())

int32 = st.integers(-(2**31), 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)


def equal(a, b):
    return [x == y for x, y in zip(a, b, strict=True)]


def shared(a, b):
    """How many leading chunks two chains have in common."""
    count = min(len(a), len(b))
    return [*equal(a.keys[:count], b.keys[:count]), False].index(False)


# ------------------------------------------------------------------ what the bytes are


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_golden(vector):
    extra_ids = vector["extra_ids"]
    if extra_ids and isinstance(extra_ids[0], list):
        extra_ids = np.array(extra_ids, np.uint64)
    identity = bytes.fromhex(vector["identity"])
    made = chain(identity, vector["token_ids"], vector["block_tokens"], extra_ids, vector["partial"])
    assert root_key(identity).hex() == vector["root_key"]
    assert [k.hex() for k in made.keys] == vector["keys"]
    assert [k.hex() for k in made.content_keys] == vector["content_keys"]
    assert made.fingerprints == vector["fingerprints"]
    assert made.packed_keys.hex() == "".join(vector["keys"])


def test_the_golden_file_is_what_the_reference_says():
    assert json.loads(json.dumps(list(reference.vectors()))) == VECTORS


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_the_reference(data):
    identity = data.draw(st.binary(min_size=32, max_size=32))
    tokens = data.draw(st.lists(int32, max_size=200))
    block_tokens = data.draw(st.integers(1, 70))
    partial = data.draw(st.booleans())
    sparse = st.one_of(st.just(0), u64)
    words = data.draw(st.sampled_from([None, sparse, st.tuples(sparse, sparse, sparse, sparse)]))
    extra_ids = None
    if words is not None:
        extra_ids = data.draw(st.lists(words, min_size=len(tokens), max_size=len(tokens)))
    four = bool(extra_ids) and isinstance(extra_ids[0], tuple)
    given_ids = np.array(extra_ids, np.uint64) if four else extra_ids
    made = chain(identity, tokens, block_tokens, given_ids, partial)
    keys, content_keys, fingerprints = reference.chain(identity, tokens, block_tokens, extra_ids, partial)
    assert (made.keys, made.content_keys, made.fingerprints) == (keys, content_keys, fingerprints)
    sizes = [min(block_tokens, len(tokens) - i * block_tokens) for i in range(len(keys))]
    assert made.token_counts == sizes and made.num_tokens == sum(sizes)
    assert made.token_ids.tolist() == tokens[: sum(sizes)]
    assert (made.identity, made.block_tokens, made.start_token) == (identity, block_tokens, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(int32, max_size=150), st.integers(1, 60))
def test_window_fingerprints_equal_those_of_chains(tokens, block_tokens):
    base, windows = reference.base_of(IDENTITY), len(tokens) - block_tokens + 1
    expected = [reference.fingerprint(base, tokens[i : i + block_tokens]) for i in range(windows)]
    found = window_fingerprints(IDENTITY, tokens, block_tokens)
    assert found.dtype == np.uint64 and found.tolist() == expected
    assert found[::block_tokens].tolist() == chain(IDENTITY, tokens, block_tokens).fingerprints


# ------------------------------------------------------------------ any difference misses


@pytest.mark.parametrize("position", [0, 1, 15, 16, 31, 47])
def test_a_changed_token_misses_from_its_chunk_on(position):
    tokens = list(range(1000, 1048))
    changed = tokens.copy()
    changed[position] += 1
    a, b = chain(IDENTITY, tokens, 16), chain(IDENTITY, changed, 16)
    chunk = position // 16
    assert equal(a.keys, b.keys) == [i < chunk for i in range(3)]
    assert equal(a.content_keys, b.content_keys) == [i != chunk for i in range(3)]
    assert equal(a.fingerprints, b.fingerprints) == [i != chunk for i in range(3)]


@pytest.mark.parametrize("bit", [0, 100, 255])
def test_a_changed_bit_of_the_identity_misses(bit):
    other = (int.from_bytes(IDENTITY, "little") ^ 1 << bit).to_bytes(32, "little")
    a, b = chain(IDENTITY, list(range(32)), 16), chain(other, list(range(32)), 16)
    assert not set(a.keys + a.content_keys + a.fingerprints) & set(b.keys + b.content_keys + b.fingerprints)
    assert root_key(IDENTITY) != root_key(other)


def test_another_chunk_size_or_a_partial_chunk_misses():
    tokens = list(range(100))
    assert not set(chain(IDENTITY, tokens, 16).keys) & set(chain(IDENTITY, tokens, 32).keys)
    whole, cut = chain(IDENTITY, tokens, 16, partial=True), chain(IDENTITY, tokens[:99], 16, partial=True)
    assert shared(whole, cut) == 6 and len(whole) == len(cut) == 7


def test_the_three_requests_of_p_tuning():
    """Requests 1 and 2 have the same ids and other extra ids; request 3 goes on like 1, then like 2."""
    soft, text = [49152 + i for i in range(32)], list(range(32))
    first = chain(IDENTITY, soft + text, 16, [1] * 32 + [0] * 32)
    second = chain(IDENTITY, soft + text, 16, [2] * 32 + [0] * 32)
    assert shared(first, second) == 0 and not set(first.keys) & set(second.keys)
    third = chain(IDENTITY, soft + text, 16, [1] * 16 + [2] * 16 + [0] * 32)
    assert shared(first, third) == 1
    # The content of a chunk of text is the same wherever it stands; that of a soft prompt is not.
    assert first.content_keys[2:] == second.content_keys[2:]
    assert not set(first.content_keys[:2]) & set(second.content_keys[:2])


def test_extra_ids_of_zero_are_no_extra_ids():
    tokens = list(range(32))
    plain, zeros = chain(IDENTITY, tokens, 16), chain(IDENTITY, tokens, 16, [0] * 32)
    assert plain.keys == zeros.keys and plain.extra_ids is None and zeros.extra_ids.tolist() == [0] * 32


def test_digests_take_four_words():
    tokens = list(range(8))
    digests = [None, bytes(range(32)), *[None] * 6]
    words = extra_ids_from_digests(digests)
    assert words.shape == (8, 4) and bytes(words)[32:64] == digests[1] and not any(bytes(words)[64:])
    made = chain(IDENTITY, tokens, 4, words)
    assert made.extra_ids.shape == (8, 4)
    for i in range(32):  # every byte of a digest counts
        other = bytearray(digests[1])
        other[i] ^= 1
        words = extra_ids_from_digests([None, other, *digests[2:]])
        assert chain(IDENTITY, tokens, 4, words).keys != made.keys
    words = extra_ids_from_digests([None] * 8)
    assert chain(IDENTITY, tokens, 4, words).keys == chain(IDENTITY, tokens, 4).keys


# ------------------------------------------------------------------ slices, equality, memory


def test_slices_share_and_stay_alive():
    tokens = list(range(200))
    whole = chain(IDENTITY, tokens, 16, partial=True)
    part = whole[3:7]
    assert len(part) == 4 and part.keys == whole.keys[3:7] and part.content_keys == whole.content_keys[3:7]
    assert part.fingerprints == whole.fingerprints[3:7] and part.token_counts == [16] * 4
    assert (part.start_token, part.num_tokens) == (48, 64)
    assert part.packed_keys == b"".join(part.keys)
    assert whole.parent_keys == [bytes(32), *whole.keys[:-1]] and part.parent_keys == whole.keys[2:6]
    assert part[1:][0] == part[1] == whole[4] and part[-1] == whole[6]
    assert (whole[-1:].num_tokens, whole[-1:].token_counts) == (8, [8])
    assert len(whole[5:2]) == 0 and whole[5:2].num_tokens == 0 and len(whole[99:]) == 0
    view = part.token_ids
    del whole, part
    assert view.tolist() == tokens[48:112] and view.readonly


def test_indexing_outside_and_with_a_step():
    made = chain(IDENTITY, list(range(32)), 16)
    for index in (2, -3):
        with pytest.raises(IndexError):
            made[index]
    with pytest.raises(InvalidArgument, match="slice is 2; it must be 1"):
        made[::2]


def test_equality_and_hash():
    tokens = list(range(64))
    a, b = chain(IDENTITY, tokens, 16), chain(IDENTITY, tokens, 16)
    assert a == b and hash(a) == hash(b) and a[1:3] == b[1:][:2] and len({a, b, a[:2]}) == 2
    assert a != a[:3] and a[:0] != a[1:1] and a != a.keys and a != chain(bytes(32), tokens, 16)
    assert chain(IDENTITY, tokens, 8)[:0] != a[:0]


KINDS = [np.int32, np.int64, np.uint32, np.uint64, list, tuple, array.array, "torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_token_ids_are_equal(kind):
    tokens = [0, 1, 5, 2**30, 2**31 - 1, *range(95)]
    if kind == "torch":
        ids = pytest.importorskip("torch").tensor([tokens, tokens])[1]
    elif kind is array.array:
        ids = array.array("i", tokens)
    elif isinstance(kind, type) and issubclass(kind, np.integer):
        ids = np.array(tokens, kind)
    else:
        ids = kind(tokens)
    assert chain(IDENTITY, ids, 16) == chain(IDENTITY, tokens, 16)


def test_odd_but_right_token_ids():
    tokens = list(range(64))
    strided = np.repeat(np.arange(64, dtype=np.int32), 2)[::2]
    swapped = np.arange(64, dtype=">i4")
    scalars = [np.int64(t) for t in tokens]
    for ids in (strided, list(swapped), scalars, range(64)):
        assert chain(IDENTITY, ids, 16) == chain(IDENTITY, tokens, 16)


def test_later_changes_of_the_input_do_not_matter():
    ids = np.arange(64, dtype=np.int32)
    made = chain(IDENTITY, ids, 16)
    ids[:] = 0
    assert made.token_ids.tolist() == list(range(64))
    assert made.content_keys == chain(IDENTITY, list(range(64)), 16).content_keys


def test_content_keys_from_many_threads():
    made = chain(IDENTITY, np.arange(4096), 16)
    found = []
    threads = [threading.Thread(target=lambda: found.append(made[1:].content_keys)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [chain(IDENTITY, np.arange(4096), 16).content_keys[1:]] * 4


# ------------------------------------------------------------------ errors name the value and the limit


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"identity": bytes(31)}, "identity has 31 bytes; it must have 32"),
        ({"identity": "x" * 32}, "identity of type str"),
        ({"block_tokens": 0}, "block_tokens is 0; allowed are 1 to 65535"),
        ({"block_tokens": -5}, "block_tokens is -5"),
        ({"block_tokens": 65536}, "block_tokens is 65536"),
        ({"token_ids": [1, 2**31, 3, 4]}, r"token_ids\[1\] is 2147483648, outside -2147483648 to 2147483647"),
        ({"token_ids": [1, 2, 3, 2**80]}, r"token_ids\[3\] is 1208925819614629174706176, outside"),
        ({"token_ids": np.array([1, 2, -(2**31) - 1, 4])}, r"token_ids\[2\] is -2147483649, outside"),
        ({"token_ids": [1, 2.0, 3, 4]}, r"token_ids\[1\] is of type float, not an int"),
        ({"token_ids": [1, "2", 3, 4]}, r"token_ids\[1\] is of type str, not an int"),
        ({"token_ids": np.ones(4)}, "token_ids must hold 32- or 64-bit integers"),
        ({"token_ids": np.ones((2, 2), np.int32)}, "token_ids has 2 dimensions, not one"),
        ({"token_ids": 7}, "token_ids must be a sequence or a buffer of ints, not int"),
        ({"extra_ids": [1, 2, 3]}, "extra_ids has 3 entries for 4 tokens"),
        ({"counts": [1, "2"]}, r"counts\[1\] is of type str, not an int"),
        ({"counts": 5}, "counts must be a sequence or a buffer of ints, not int"),
        ({"extra_ids": []}, "extra_ids has 0 entries for 4 tokens"),
        ({"extra_ids": [0, 0, -1, 0]}, r"extra_ids\[2\] is -1, outside 0 to 18446744073709551615"),
        ({"extra_ids": [0, 0, 2**64, 0]}, r"extra_ids\[2\] is 18446744073709551616, outside"),
        ({"extra_ids": np.array([0, 0, -1, 0])}, r"extra_ids\[2\] is -1, outside"),
        ({"extra_ids": np.zeros((3, 4), np.uint64)}, "extra_ids has 3 entries for 4 tokens"),
        ({"extra_ids": np.zeros((4, 3), np.uint64)}, "extra_ids has 2 dimensions, not one"),
        ({"token_ids": np.zeros(2**24 + 1, np.int32)}, r"len\(token_ids\) is 16777217; allowed .* 16777216"),
        ({"token_ids": None}, "token_ids must be a sequence or a buffer of ints, not NoneType"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(InvalidArgument, match=text) as raised:
        chain(**{"identity": IDENTITY, "token_ids": [1, 2, 3, 4], "block_tokens": 2, **arguments})
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, kvclient.InvalidArgument)


def test_errors_of_the_rest():
    with pytest.raises(InvalidArgument, match="identity has 3 bytes"):
        root_key(b"abc")
    with pytest.raises(InvalidArgument, match=r"digests\[1\] has 5 bytes; it must have 32"):
        extra_ids_from_digests([None, b"short"])
    with pytest.raises(InvalidArgument, match="block_tokens is 0"):
        window_fingerprints(IDENTITY, [1, 2], 0)


def test_a_list_that_shrinks_while_it_is_read():
    class Token:
        def __index__(self):
            tokens.clear()
            return 1

    tokens = [1, Token(), 3, 4]
    with pytest.raises(InvalidArgument, match="token_ids changed its length"):
        chain(IDENTITY, tokens, 2)


def test_a_failing_index_is_not_swallowed():
    class Token:
        def __index__(self):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        chain(IDENTITY, [Token()], 1)


def test_derived_keys_are_plain_hashes():
    """A batch of names in one call gives what hashlib gives one by one, listed, packed and from one piece."""
    identity = bytes(range(32))
    derived = DerivedKeys(identity)
    for length in (0, 32, 36, 55, 56, 200):
        names = [bytes([i]) * length for i in range(5)]
        one_by_one = [hashlib.sha256(identity + bytes(32) + name).digest() for name in names]
        assert derived.listed(names) == one_by_one
        assert derived.packed(tuple(names)) == b"".join(one_by_one)
        if length == 32:
            assert derived.packed(b"".join(names)) == b"".join(one_by_one)
    assert derived.packed([]) == b"" and derived.listed([]) == []
    for wrong in ([b"x", "text"], bytes(33)):
        with pytest.raises(InvalidArgument):
            derived.packed(wrong)
    with pytest.raises(InvalidArgument):
        DerivedKeys(bytes(31))
