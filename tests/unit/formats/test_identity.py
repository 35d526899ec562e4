"""The reuse identity: every dimension counts, the encoding is injective, and neither ever changes by
accident.

Never touches a model; what a live model's dimensions are is tests/hf/attachment/test_changed.py.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.blocks import meta
from kvclient.blocks.identity import CONFIG_DENY_LIST, Dimensions, encode, reuse_identity, salted
from kvclient.errors import InvalidArgument

BASE = Dimensions(
    weights_digest=bytes(32),
    weights_revision="main",
    config={"hidden_size": 48, "rope_theta": 10000.0, "nested": {"a": [1, 2]}},
    attention="sdpa",
    weight_quantisation=None,
    compute_dtype="torch.float32",
    kv_dtype="float32",
    codec={"name": "none"},
    layout=b"KVL1",
    layers=(0, 3),
    kv_heads=(0, 2),
    rope={"inv_freq": {"rotary_emb.inv_freq": bytes(32)}, "attention_scaling": {}, "parameters": None},
    adapter_digest=b"",
    salt=b"",
)
CHANGES = {
    "weights_digest": bytes(31) + b"\1",
    "weights_revision": "other",
    "config": {**BASE.config, "rope_theta": 10001.0},
    "attention": "eager",
    "weight_quantisation": {"bits": 8},
    "compute_dtype": "torch.bfloat16",
    "kv_dtype": "bfloat16",
    "codec": {"name": "kivi", "bits": 8},
    "layout": b"KVL2",
    "layers": (0, 4),
    "kv_heads": (0, 1),
    "rope": {**BASE.rope, "inv_freq": {"rotary_emb.inv_freq": bytes(31) + b"\1"}},
    "adapter_digest": b"lora",
    "salt": b"tenant",
    "key_scheme": 2,
}


def test_every_dimension_has_a_change_in_this_file():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Dimensions)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_one_dimension_changes_the_identity(name):
    changed = dataclasses.replace(BASE, **{name: CHANGES[name]})
    assert reuse_identity(changed) != reuse_identity(BASE)


def test_a_namespaces_salt_is_mixed_in_without_ambiguity():
    assert salted(b"", b"own") == b"own", "a namespace without a salt changes nothing"
    pairs = [(b"", b""), (b"n", b""), (b"n", b"o"), (b"no", b""), (b"", b"no"), (b"o", b"n")]
    assert len({salted(*pair) for pair in pairs}) == len(pairs)


def test_golden():
    # A change of this value orphans every block ever stored: bump KEY_SCHEME with it.
    assert reuse_identity(BASE).hex() == GOLDEN


GOLDEN = "5662b31aaae376136c2276489f584339aaf57a451a3b3a4f6c4037effc4f64e2"


@pytest.mark.parametrize("name", sorted(CONFIG_DENY_LIST))
def test_denied_fields_do_not_count_at_any_depth(name):
    config = {**BASE.config, name: "x", "nested": {"a": [1, 2], name: 7}}
    assert reuse_identity(dataclasses.replace(BASE, config=config)) == reuse_identity(BASE)


def test_an_unknown_field_counts():
    config = {**BASE.config, "a_field_of_next_year": False}
    assert reuse_identity(dataclasses.replace(BASE, config=config)) != reuse_identity(BASE)


def test_what_has_no_canonical_form_is_an_error():
    with pytest.raises(InvalidArgument, match="object"):
        encode({"x": object()})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def canonical(value):
    """A Python value that is equal for two values exactly if their encodings must be."""
    if isinstance(value, dict):
        return ("dict", tuple(sorted((key, canonical(item)) for key, item in value.items())))
    if isinstance(value, list):
        return ("list", tuple(canonical(item) for item in value))
    return (type(value).__name__, repr(value))


@given(values, values)
def test_the_encoding_is_injective(value, other):
    assert (encode(value) == encode(other)) == (canonical(value) == canonical(other))


@given(st.dictionaries(st.text(), st.integers(), max_size=6))
def test_the_order_of_a_mapping_does_not_count(mapping):
    assert encode(mapping) == encode(dict(reversed(mapping.items())))


@given(st.binary(max_size=600), st.integers(0, 200))
def test_unpack_of_garbage_is_none_or_whole(area, tokens):
    found = meta.unpack(area, tokens)
    assert found is None or len(found.token_ids) == 4 * tokens


def test_meta_round_trip():
    packed = meta.pack(meta.Meta(b"p" * 32, b"c" * 32, bytes(range(64)), b""))
    assert meta.unpack(packed + bytes(99), 16) == (b"p" * 32, b"c" * 32, bytes(range(64)), b"", b"")
    assert meta.unpack(packed, 15) is None
    assert meta.unpack(packed[:-1], 16) is None
