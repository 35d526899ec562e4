"""Proves that blocks which another process seals between a look and the claim are each taken for what
they are, also where a codec keeps the last whole block of what was found as it was computed.

Method: a tiny random model whose client does not show some blocks at the first look, and shows them once the
claim says that they exist. The answer must be that of a call which saw all of them at once.
"""

import pytest
import torch

import kvclient.hf
from kvclient.blocks.codec import Kivi
from kvclient.hf.call import Clock
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.save import Publisher
from tests.hf.zoo import build, generate, near, prompt

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

        def late(keys, *args, **kwargs):
            looks.append(len(keys))
            blocks = get(keys, *args, **kwargs)
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


@pytest.mark.parametrize("in_place", [None, False])
@pytest.mark.parametrize("when", [1, 2])
def test_blocks_sealed_before_a_claim_leave_no_wrong_last_block(client, monkeypatch, in_place, when):
    """The prompt ends with a block, and all of it is sealed between the look and a claim: what is left to
    compute is its last token, which makes no block.
    """
    models, ids, claims = [build("llama", layers=2) for _ in range(2)], prompt(4 * BLOCK), []
    options = {"block_tokens": BLOCK, "codec": "int8", "publish_generated": False, "self_test": False}
    options["in_place"] = in_place
    writing, other = client.another(), client.another()
    with (
        kvclient.hf.attach(models[0], writing, **options) as kv,
        kvclient.hf.attach(models[1], other, **options),
    ):
        generate(models[1], ids[:, : 2 * BLOCK + 6], 1)
        with kv.bypass():
            _, _, plain = generate(models[0], ids, 1)
        create = writing.create

        def late(*args, **kwargs):
            claims.append(args)
            if len(claims) == when:
                generate(models[1], ids, 1)
            return create(*args, **kwargs)

        monkeypatch.setattr(writing, "create", late)
        for asked in (ids, torch.cat([ids, prompt(9, seed=2)], dim=1)):
            _, _, cache = generate(models[0], asked, 1)
            for start in range(0, kv.last.reused_tokens // BLOCK * BLOCK, BLOCK):
                ours, theirs = (c.layers[0].keys[:, :, start : start + BLOCK] for c in (cache, plain))
                assert near(ours, theirs, 2e-2), start
    assert claims
    assert writing.stats()["created"] == 0


@pytest.mark.parametrize("codec", [None, Kivi(8, BLOCK)])
def test_a_block_is_sealed_only_if_all_its_columns_came(client, codec):
    """They come in stretches, in order: what is behind a gap fills no block, and nothing counts twice."""
    form = BlockFormat(1, 2, 8, torch.float32, codec)
    chain = kvclient.chain(bytes(32), list(range(2 * BLOCK)), BLOCK)
    publisher = Publisher(client, client.register_layout(form.layout(BLOCK)), 1, 35, None, Clock(), form)
    storage = torch.randn(2, 1, 2, 2 * BLOCK, 8)
    publisher.claim(chain, 0, 0, 0)
    for start, stop in ((1, BLOCK), (BLOCK, BLOCK + 10), (BLOCK, BLOCK + 20), (BLOCK + 20, 2 * BLOCK)):
        publisher.written(0, start, stop, storage, 0)
    publisher.seal()
    publisher.abort()
    assert publisher.published == 1 and list(client.lookup(chain).states) == [0, 2]
    read = form.read_tensor(client.get(chain[1:])[0], 0)
    assert near(read, storage[:, 0, :, BLOCK:], 1e-2)
