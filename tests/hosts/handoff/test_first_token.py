"""The first token and the sampler's state travel with a handoff: who decodes computes nothing of the prompt,
and answers as one host does. Where the options are others, or say more than both ends compare, the token is
not used.

Tiny random models, two daemons that live for all of them; what was computed is what the report says.
"""

import dataclasses
import json

import pytest
import torch

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import Handoff
from tests.hf.zoo import build, prompt
from tests.hosts.handoff.test_classes import left_padded

BLOCK, WAIT_S = 16, 60.0
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}


@pytest.fixture(scope="module")
def pair(pair_of_hosts):
    """Attachments of equal models, each on a host of its own."""
    with pair_of_hosts[0].connect() as here, pair_of_hosts[1].connect() as there:
        made = [
            kvclient.hf.attach(build("llama"), client, block_tokens=BLOCK, self_test=False)
            for client in (here, there)
        ]
        yield made
        for kv in made:
            kv.detach()


def handed(kv, ids, **options):
    handoff = kv.handoff(input_ids=ids, **options)
    assert handoff.wait(WAIT_S)
    handoff.release()
    return Handoff.from_json(handoff.to_json())


def plain(ids, seed=None, **options):
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0, **options}
    model = build("llama")
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(ids, **options)


def resumed(kv, handoff, **options):
    return kv.resume(handoff, **{"max_new_tokens": 6, "pad_token_id": 0, **options})


def test_greedy_decoding_computes_no_token_of_the_prompt(pair):
    ids = prompt(100, seed=41)
    handoff = handed(pair[0], ids)
    assert handoff.first is not None and not handoff.first.sampler
    assert torch.equal(resumed(pair[1], handoff), plain(ids))
    last = pair[1].last
    assert (last.prompt_tokens, last.reused_tokens) == (101, 100), "all but the first token itself"


def test_a_prefill_in_chunks_ends_with_a_first_token_too(pair):
    ids = prompt(100, seed=51)
    assert torch.equal(resumed(pair[1], handed(pair[0], ids, prefill_chunk_size=32)), plain(ids))
    assert pair[1].last.reused_tokens == 100


def test_a_sampler_goes_on_where_the_prefills_stood(pair):
    ids = prompt(100, seed=42)
    wanted = plain(ids, seed=5, **SAMPLED)
    behind = torch.get_rng_state()
    torch.manual_seed(5)
    handoff = handed(pair[0], ids, **SAMPLED)
    torch.manual_seed(99)  # not what is drawn from
    assert torch.equal(resumed(pair[1], handoff, **SAMPLED), wanted)
    assert pair[1].last.reused_tokens == 100
    assert torch.equal(torch.get_rng_state(), behind)
    other = resumed(pair[1], handoff, **SAMPLED)
    assert torch.equal(other, wanted), "again, and by as many as want it"


def test_a_batch_with_padding_has_a_token_for_each_row(pair):
    ids, mask = left_padded(prompt(90, seed=43), prompt(100, seed=44), prompt(37, seed=45))
    handoff = handed(pair[0], ids, attention_mask=mask)
    assert len(handoff.first.tokens) == 3
    assert torch.equal(resumed(pair[1], handoff), plain(ids, attention_mask=mask))
    assert pair[1].last.prompt_tokens - pair[1].last.reused_tokens < 101 * 3


@pytest.mark.parametrize(
    "options",
    [
        SAMPLED, {"num_beams": 2}, {"repetition_penalty": 1.3}, {"min_new_tokens": 2},
        {"output_logits": True, "return_dict_in_generate": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_other_options_would_not_have_chosen_is_not_used(pair, options):
    ids = prompt(100, seed=46)
    handoff = handed(pair[0], ids)
    wanted = plain(ids, seed=7, **options)
    torch.manual_seed(7)
    found = resumed(pair[1], handoff, **options)
    assert pair[1].last.prompt_tokens == 100 * options.get("num_beams", 1)
    if "output_logits" in options:
        assert len(found.logits) == 6
        found, wanted = found.sequences, wanted.sequences
    assert torch.equal(found, wanted)


def test_options_that_look_at_the_text_hold_behind_the_first_token(pair):
    ids, options = prompt(100, seed=47), {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    handoff = handed(pair[0], ids, **options)
    assert torch.equal(resumed(pair[1], handoff, **options), plain(ids, **options))
    assert pair[1].last.reused_tokens == 100


def test_an_answer_that_ends_with_its_first_token_is_whole(pair):
    ids = prompt(100, seed=48)
    handoff = handed(pair[0], ids)
    end = handoff.first.tokens[0]
    assert torch.equal(resumed(pair[1], handoff, eos_token_id=end), plain(ids, eos_token_id=end))
    assert torch.equal(resumed(pair[1], handoff, max_new_tokens=1), plain(ids, max_new_tokens=1))
    rows = torch.cat([ids, prompt(100, seed=49)])
    both = handed(pair[0], rows)
    end = both.first.tokens[0]
    assert torch.equal(resumed(pair[1], both, eos_token_id=end), plain(rows, eos_token_id=end))


def test_what_is_sent_at_once_or_by_an_older_host_has_none_and_is_read(pair):
    ids = prompt(100, seed=50)
    handoff = handed(pair[0], ids)
    said = json.loads(handoff.to_json())
    first = said.pop("first")
    older = Handoff.from_json(json.dumps(said))
    assert older == handoff and older.first is None
    assert torch.equal(resumed(pair[1], older), plain(ids))
    moved = dataclasses.replace(handoff, rows=((1, 2, 3),))  # the token is of other prompts
    assert torch.equal(resumed(pair[1], moved), plain(torch.tensor([[1, 2, 3]])))
    wrong = (
        {}, [], 5, {**first, "tokens": ["a"]}, {**first, "tokens": 1}, {**first, "sampler": "%"},
        {**first, "how": 1}, {**first, "prompts": "00"}, {**first, "sampler": "AAAA" * 40000},
    )  # fmt: skip
    for bad in wrong:
        with pytest.raises(InvalidArgument, match="first token"):
            Handoff.from_json(json.dumps({**said, "first": bad}))
