"""Proves that drafts of every kind give a streamed model's answers: those of plain decoding, every slot back.

Method: the drafters of test_speculation.py on a tiny packed model whose layers are read from the disk, out of
its rearranged file and in place; one of them a streamed model too.
"""

import pytest
import torch

from kvclient.hf.speculation import DraftModel, Speculation
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.engine.test_speculation import NEW, drafters, plain, prompts, tiny


@pytest.mark.parametrize("rearrange", [True, False])
def test_drafts_of_every_kind_on_a_streamed_model(tmp_path, rearrange):
    """Out of the text, by a model, which may be streamed too, as chains and as trees."""
    home = write_checkpoint(tmp_path, tiny(), 32)
    config = StreamingConfig(residency="full_stream", rearrange=rearrange)
    model, small = (StreamingCausalLM.from_pretrained(home, config) for _ in range(2))
    ids = prompts()[0]
    want = plain(model, ids)
    drafts = {**drafters(model, want[0].tolist()), "itself": small, "its tree": DraftModel(small, branches=3)}
    for name, draft in drafts.items():
        speculation = Speculation(draft, clock=lambda: 0.0)
        assert torch.equal(plain(model, ids, custom_generate=speculation), want), name
        assert speculation.last.off is None and speculation.last.tokens == NEW
        assert all(slot.users == 0 for slot in streams_of(model).scheduler.slots)
    for streamed in (model, small):
        streams_of(streamed).close()
