"""Proves that a streamed answer is the whole answer cut in pieces, whatever its tokens and stop strings are.

Method: random texts cut into random tokens of bytes (Hypothesis), so that characters and stop strings lie
over token borders, against the text decoded at once; and a tokenizer as Llama 2's, which spells what it does
not know in bytes and decodes a run of them as a whole.
"""

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from kvclient.serve.engine.text import CONTEXT, UNFINISHED, Text


class Bytes:
    """Tokens are pieces of bytes; the tokenizer decodes them together."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


@example(58 * "a" + "b🙂", [*58 * [1], 2, 1], ["b"])  # it ends within a character
@given(st.text("abé🙂 \n", max_size=60), st.lists(st.integers(1, 5), min_size=60, max_size=60),
       st.lists(st.text("abé🙂 ", min_size=1, max_size=5), max_size=3))  # fmt: skip
@settings(deadline=None)
def test_the_pieces_are_the_text_up_to_its_first_stop(text, cuts, stops):
    data, pieces, at = text.encode(), [], 0
    for cut in cuts:
        if data[at : at + cut]:
            pieces.append(data[at : at + cut])
        at += cut
    text = b"".join(pieces).decode("utf-8", errors="replace")
    shown, stream = "", Text(Bytes(pieces), stops)
    for index in range(len(pieces)):
        shown += stream.add(index)
        assert not any(stop in shown for stop in stops), "a stop string was shown"
        if stream.stopped is not None:
            break
    shown += stream.end()
    assert not any(stop in shown for stop in stops), "a stop string was in what was held back"
    met = [at for stop in stops if (at := text.find(stop)) >= 0]
    whole = text[: min(met)] if met else text
    if stream.stopped is None:
        assert shown == text
    else:
        # The first stop string to be whole wins: one that begins earlier but ends later may not be whole yet.
        assert text.startswith(shown + stream.stopped) and len(shown) >= len(whole)


@pytest.fixture(scope="module")
def spelling():
    words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *"▁ab"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    )


@example(text="ab " + 9 * "漢" + " b")
@given(text=st.text("abé漢🙂 ", min_size=12, max_size=80))
@settings(deadline=None)
def test_letters_in_single_bytes_stay_what_they_are(spelling, text):
    stream, ids = Text(spelling), spelling(text)["input_ids"]
    shown = "".join(map(stream.add, ids)) + stream.end()
    assert shown == spelling.decode(ids) == text


@example(text="ab a", cut=2)
@example(text="漢漢漢漢漢漢 b", cut=20)
@given(text=st.text("abé漢🙂 ", min_size=1, max_size=80), cut=st.integers(0, 400))
@settings(deadline=None)
def test_what_goes_on_a_text_is_the_rest_of_it(spelling, text, cut):
    """A completion: its first word lost its space."""
    ids = spelling(text)["input_ids"]
    before = spelling.decode(ids[: cut % len(ids)])
    stream = Text(spelling, behind=ids[: cut % len(ids)])
    shown = "".join(map(stream.add, ids[cut % len(ids) :])) + stream.end()
    if UNFINISHED not in before:  # it is whole characters
        assert before + shown == text


@pytest.mark.parametrize("ends", [1, 8, 12, 40, 400])
@pytest.mark.parametrize("behind", [" a b", " 漢漢", "漢 a"])
def test_what_is_behind_a_run_of_ends_is_what_it_is(spelling, ends, behind):
    """With ignore_eos: a word behind twelve ends lost its space, as if it were the answer's first."""
    before, after = (spelling(text)["input_ids"] for text in ("a a a", behind.removeprefix(" ")))
    after = after if behind.startswith(" ") else after[1:]  # every text is spelled with a space in front
    ids = [*before, *[spelling.eos_token_id] * ends] * 2 + after * 9
    stream = Text(spelling)
    shown = "".join(map(stream.add, ids)) + stream.end()
    assert shown == spelling.decode(ids, skip_special_tokens=True)


def test_an_endless_run_of_ends_is_not_decoded_from_all_its_tokens_at_each(spelling):
    class Counting:
        calls = 0

        def decode(self, ids, skip_special_tokens):
            self.calls += 1
            return spelling.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    stream = Text(counting)
    for token in [*spelling("a a")["input_ids"], *[spelling.eos_token_id] * 200]:
        stream.add(token)
    assert counting.calls <= 200 * (2 * CONTEXT + 2)
