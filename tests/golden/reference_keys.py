"""The key scheme in plain Python, slow and obvious: a second opinion on native/core/format/keys.cc for the
tests.

Goal: someone who ports the scheme to another language can read it here in a minute.
`python tests/golden/reference_keys.py` writes tests/golden/keys.json anew. Its vectors are a promise: once
published, a change to any of them needs a new key-scheme version, because stored blocks would be missed.
"""

import json
import struct
from hashlib import sha256
from pathlib import Path

PRIME = 2**61 - 1


def root_key(identity):
    return sha256(b"kvr1" + identity).digest()


def base_of(identity):
    return 2 + int.from_bytes(sha256(b"kvf1" + identity).digest()[:8], "little") % (PRIME - 3)


def fingerprint(base, tokens):
    value = 0
    for token in tokens:
        value = (value * base + token % 2**32 + 1) % PRIME
    return value


def content(tokens, extra_ids):
    """What a key hashes of a chunk. `extra_ids` has an int or a tuple of four ints per token, or is None."""
    words = [w for e in extra_ids or () for w in (e if isinstance(e, tuple) else (e,))]
    has_extra = any(words)
    head = struct.pack("<IB", len(tokens), has_extra) + struct.pack(f"<{len(tokens)}i", *tokens)
    return head + (struct.pack(f"<{len(words)}Q", *words) if has_extra else b"")


def chain(identity, token_ids, block_tokens=128, extra_ids=None, partial=False):
    """(prefix keys, content keys, fingerprints) of the prompt's chunks."""
    keys, content_keys, fingerprints = [], [], []
    parent, base = root_key(identity), base_of(identity)
    for start in range(0, len(token_ids), block_tokens):
        tokens = token_ids[start : start + block_tokens]
        if len(tokens) < block_tokens and not partial:
            break
        hashed = content(tokens, extra_ids and extra_ids[start : start + block_tokens])
        parent = sha256(b"kvp1" + parent + hashed).digest()
        keys.append(parent)
        content_keys.append(sha256(b"kvc1" + identity + hashed).digest())
        fingerprints.append(fingerprint(base, tokens))
    return keys, content_keys, fingerprints


def cases():
    identity, other = bytes(range(32)), sha256(b"another model").digest()
    prompt = [(i * 7919) % 49152 for i in range(40)]
    yield "two full chunks, the rest left out", identity, prompt, 16, None, False
    yield "the same with the rest", identity, prompt, 16, None, True
    yield "another identity", other, prompt, 16, None, False
    yield "one token a chunk", identity, prompt[:3], 1, None, False
    yield "the default size", identity, [i % 1000 for i in range(300)], 128, None, True
    yield "shorter than a chunk", identity, prompt[:5], 16, None, False
    yield "empty", identity, [], 16, None, True
    yield "the ends of int32", identity, [2**31 - 1, -(2**31), -1, 0], 4, None, False
    yield "extra ids of zero are none", identity, prompt[:32], 16, [0] * 32, False
    yield "an extra id in the second chunk", identity, prompt[:32], 16, [0] * 20 + [7] + [0] * 11, False
    yield "the ends of u64", identity, prompt[:4], 2, [1, 2**64 - 1, 0, 2**63], False
    digests = [struct.unpack("<4Q", sha256(bytes([i])).digest()) if i % 3 else (0,) * 4 for i in range(8)]
    yield "digests", identity, prompt[:8], 4, digests, False
    # A soft prompt of 4 virtual tokens, then text: extra ids tell the soft prompts apart.
    soft = [49152, 49153, 49154, 49155]
    yield "p-tuning 1", identity, soft + prompt[:4], 4, [1] * 4 + [0] * 4, False
    yield "p-tuning 2", identity, soft + prompt[:4], 4, [2] * 4 + [0] * 4, False
    yield "p-tuning 3", identity, soft * 2 + prompt[:4], 4, [1] * 4 + [2] * 4 + [0] * 4, False


def vectors():
    for name, identity, token_ids, block_tokens, extra_ids, partial in cases():
        keys, content_keys, fingerprints = chain(identity, token_ids, block_tokens, extra_ids, partial)
        yield {
            "name": name,
            "identity": identity.hex(),
            "token_ids": token_ids,
            "block_tokens": block_tokens,
            "extra_ids": extra_ids,
            "partial": partial,
            "root_key": root_key(identity).hex(),
            "fingerprint_base": base_of(identity),
            "keys": [key.hex() for key in keys],
            "content_keys": [key.hex() for key in content_keys],
            "fingerprints": fingerprints,
        }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(vector) for vector in vectors())
    Path(__file__).with_name("keys.json").write_text(f"[\n{lines}\n]\n")
