"""Proves that blocks which another process seals between a look and the claim are each taken for what
they are, also where a codec keeps the last whole block of what was found as it was computed.

Method: a tiny random model whose client does not show some blocks at the first look, and shows them once the
claim says that they exist. The answer must be that of a call which saw all of them at once.
"""

import pytest
import torch

import kvclient.hf
from tests.engines.zoo import build, generate, near, prompt

BLOCK, SEEN = 32, 3


class Hiding:
    """What get answered, without the blocks from `count` on."""

    def __init__(self, blocks, count):
        self._blocks, self._count = blocks, count

    def __getattr__(self, name):
        return getattr(self._blocks, name)

    def __getitem__(self, index):
        return None if index >= self._count else self._blocks[index]


@pytest.mark.parametrize("in_place", [False, True])
def test_the_last_block_of_the_first_look_is_not_taken_for_a_later_one(client, monkeypatch, in_place):
    model, ids = build("llama"), prompt(5 * BLOCK + 5)
    options = {"block_tokens": BLOCK, "codec": "int8", "in_place": in_place, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        generate(model, ids[:, : SEEN * BLOCK + 5], 1)
        generate(model, ids, 1)
        _, wanted, _ = generate(model, ids, 1)
        get, looks = client.get, []

        def late(keys, *args, **given):
            looks.append(len(keys))
            blocks = get(keys, *args, **given)
            return Hiding(blocks, SEEN) if len(looks) == 1 else blocks

        monkeypatch.setattr(client, "get", late)
        _, found, _ = generate(model, ids, 1)
        assert looks[0] == 5 and kv.last.reused_tokens == 5 * BLOCK
        assert near(found, wanted, 2e-2)
        assert kv.last.full_tokens == 4 + BLOCK


def test_a_row_that_gives_up_blocks_of_others_gives_up_what_stands_for_them(client, monkeypatch):
    """Two rows wait for no blocks that are being written: what is left of the one ends before its last."""
    model = build("llama")
    rows = torch.cat([prompt(5 * BLOCK + 5), prompt(5 * BLOCK + 5, seed=2)])
    options = {"block_tokens": BLOCK, "codec": "int8", "in_place": False, "self_test": False}
    with kvclient.hf.attach(model, client, **options) as kv:
        for stop in (SEEN * BLOCK + 5, rows.shape[1]):
            generate(model, rows[:1, :stop], 1)
        generate(model, rows[1:, : SEEN * BLOCK + 5], 1)
        chain = kv.chunker.chain(kv.identity, rows[0].numpy())
        client.delete([chain.keys[1]])
        writer = client.create(chain[1:2], client.register_layout(kv.form.layout(BLOCK)))
        _, found, _ = generate(model, rows, 1)
        assert kv.last.reused_tokens == 2 * BLOCK
        writer.abort()
        with kv.bypass():
            _, wanted, _ = generate(model, rows, 1)
        assert near(found, wanted, 2e-2)
