"""Proves that what is told of single tokens is the same streamed as whole, and says their own bytes; and that
the coldest temperature chooses one.

Method: a Run over events that a test makes, with a tokenizer of a few words; the bytes of pieces of
characters in vocabularies of both kinds; logits that a temperature near nothing sends beyond all numbers.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from kvclient.serve.engine.job import Done, Prompt, Token
from kvclient.serve.engine.sampling import Chosen, Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.errors import ApiError
from kvclient.serve.http.answers.chat import chat_stream, chat_whole, token_bytes
from kvclient.serve.http.answers.completions import completion_stream, completion_whole
from kvclient.serve.http.answers.run import Choice, Run
from kvclient.serve.http.asking import Ask
from kvclient.serve.http.schema import ChatRequest, CompletionRequest

WORDS = ["one ", "two", " three", "é"]


class Words:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(WORDS[token] for token in ids)

    def convert_ids_to_tokens(self, token):
        return WORDS[token]


class Events(Run):
    """Two answers whose events come one by one from each."""

    def __init__(self, request):
        scored = (None, Chosen(1, -0.5, ((1, -0.5), (2, -1.0))))
        ask = Ask([0, 1], 2, Sampling(logprobs=request.logprobs), request, echo=request.echo)
        self.asking = SimpleNamespace(tokenizer=Words(), model_name="tiny", fingerprint="x")
        self.began = self.first_at = 0.0
        self._ask, self._scored = ask, scored if request.echo and request.logprobs is not None else ()
        self.close = lambda: None

    async def told(self, made):
        self._events = asyncio.Queue()
        self.choices = [Choice(self._ask), Choice(self._ask)]
        for index in (1, 0):
            self._events.put_nowait((index, Prompt(0, 0, 0, 0, None, self._scored)))
        for token in (2, 3):
            for index in (0, 1):
                self._events.put_nowait((index, Token(WORDS[token], Chosen(token, -1.0, ((token, -1.0),)))))
        for index in (0, 1):
            self._events.put_nowait((index, Done("length", "")))
        if made is completion_whole:
            await self._all()
            return made(self)
        return [chunk async for chunk in made(self)]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("logprobs", [2, None])
def test_a_streams_pieces_are_the_whole_with_what_is_told_of_each_token(echo, logprobs):
    request = CompletionRequest(prompt=[0, 1], echo=echo, logprobs=logprobs, max_tokens=2)
    whole = asyncio.run(Events(request).told(completion_whole))["choices"]
    chunks = asyncio.run(Events(request).told(completion_stream))
    for choice in whole:
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        if logprobs is None:
            assert choice["logprobs"] is None and not told
            continue
        for name, values in choice["logprobs"].items():
            assert [value for piece in told for value in piece[name]] == values
        assert len(choice["logprobs"]["tokens"]) == (4 if echo else 2)


def test_of_what_is_not_there_for_a_client_that_is_gone_no_answer_is_made():
    """An answer of probabilities was made of a first token that nobody had computed. That the client is gone
    is heard, and not looked for: where the clock stands still, too."""

    async def gone():
        pass

    def still():
        loop = asyncio.new_event_loop()
        loop.time = lambda: 0.0
        return loop

    async def asked():
        run = Events(CompletionRequest(prompt=[0, 1], max_tokens=2))
        run._events, run.choices = asyncio.Queue(), [Choice(run._ask)]
        await run.whole(gone())

    with pytest.raises(ApiError) as told, asyncio.Runner(loop_factory=still) as runner:
        runner.run(asked())
    assert told.value.status == 499


def test_where_it_is_not_known_whether_a_client_is_there_its_answer_is_whole(caplog):
    """It was thrown away, and told as a client's that had left."""

    async def gone():
        raise RuntimeError("no word of it")

    async def asked():
        run = Events(CompletionRequest(prompt=[0, 1], max_tokens=2))
        run._events, run.choices = asyncio.Queue(), [Choice(run._ask)]
        whole = asyncio.ensure_future(run.whole(gone()))
        for _ in range(5):  # the failure is heard first
            await asyncio.sleep(0)
        run._events.put_nowait((0, Done("stop", "said")))
        await whole
        return run.choices[0].text

    assert asyncio.run(asked()) == "said" and "no word of it" in caplog.text


@pytest.mark.parametrize(
    ("word", "text", "wanted"),
    [
        ("Ġa", " a", [32, 97]),
        ("Ã", "\ufffd", [0xC3]),
        ("©Ġ", "\ufffd ", [0xA9, 0x20]),
        ("ï¿½", "\ufffd", [0xEF, 0xBF, 0xBD]),
        ("<0xE2>", "\ufffd", [0xE2]),
        ("\ufffd", "\ufffd", [0xEF, 0xBF, 0xBD]),
        ("\u4e00", "\ufffd", None),
    ],
)
def test_a_piece_of_a_character_is_told_as_its_own_bytes(word, text, wanted):
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token: word)
    assert token_bytes(tokenizer, 7, text) == wanted
    assert wanted is None or bytes(wanted).decode(errors="replace") == text


class Spelled:
    """As SentencePiece's: a word has its space in front, which a text's first loses."""

    words = "▁one", "▁two", "s", "▁", "▁▁▁x"

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    def convert_ids_to_tokens(self, token):
        return self.words[token]


class Spelling(Run):
    """One answer of five such tokens."""

    def __init__(self, request, echo, behind):
        self.asking = SimpleNamespace(tokenizer=Spelled(), model_name="tiny", fingerprint="x")
        self.began, self.first_at, self.close = 0.0, 0.0, lambda: None
        self.choices = [Choice(Ask([0, 1], 5, Sampling(logprobs=1), request, echo=echo))]
        self._events, text = asyncio.Queue(), Text(self.asking.tokenizer, behind=behind)
        scored = (None, Chosen(1, -0.5, ((1, -0.5),))) if echo else ()
        self._events.put_nowait((0, Prompt(0, 0, 0, 0, None, scored)))
        for token in (1, 2, 3, 4, 0):
            chosen = Chosen(token, -1.0, ((token, -1.0),))
            self._events.put_nowait((0, Token(text.add(token), chosen)))
        self._events.put_nowait((0, Done("length", text.end())))

    async def told(self, whole, stream):
        """Its choices, in pieces where it is streamed."""
        if stream is not None:
            return [chunk["choices"][0] async for chunk in stream(self)]
        await self._all()
        return whole(self)["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_a_completions_tokens_are_its_text_where_words_have_their_space_in_front(echo, stream):
    """They had none, so "one", "two" were told of "one two"."""
    run = Spelling(CompletionRequest(prompt=[0, 1], logprobs=1, echo=echo), echo, [0, 1])
    pieces = asyncio.run(run.told(completion_whole, completion_stream if stream else None))
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    words = [word for part in told for word in part["tokens"]]
    text = "one two" * echo + " twos    x one"
    assert "".join(words) == "".join(piece["text"] for piece in pieces) == text
    tops = [next(iter(top)) for part in told for top in part["top_logprobs"] if top]
    assert tops == words[echo:]
    offsets = [at for part in told for at in part["text_offset"]]
    assert all(text.startswith(word, at) for word, at in zip(words, offsets, strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_chats_tokens_are_its_text_where_words_have_their_space_in_front(goes_on, stream):
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "one"}]
    request = ChatRequest(messages=said, logprobs=True, top_logprobs=1, continue_final_message=goes_on)
    run = Spelling(request, False, [0, 1] if goes_on else ())
    pieces = asyncio.run(run.told(chat_whole, chat_stream if stream else None))
    messages = [piece["delta"] if stream else piece["message"] for piece in pieces]
    rows = [row for piece in pieces if piece["logprobs"] for row in piece["logprobs"]["content"]]
    text = " twos    x one" if goes_on else "twos    x one"
    assert "".join(message.get("content", "") for message in messages) == text
    assert "".join(row["token"] for row in rows) == text
    assert bytes(value for row in rows for value in row["bytes"]).decode() == text
    assert [row["top_logprobs"][0]["token"] for row in rows] == [row["token"] for row in rows]


class Pieces:
    """A character of three bytes, each a token; and one of one."""

    words = "âĤ¬x"

    def decode(self, ids, skip_special_tokens=True):
        return bytes([[0xE2, 0x82, 0xAC, 0x78][token] for token in ids]).decode(errors="replace")

    def convert_ids_to_tokens(self, token):
        return self.words[token]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_one_character_have_its_place_and_names_of_their_own(stream):
    """They were "\ufffd" all, of which a list of the likeliest kept one, and what came behind them stood
    too far back."""
    run = Events(CompletionRequest(prompt=[3], max_tokens=4, logprobs=2))
    run.asking.tokenizer, top = Pieces(), ((0, -1.0), (1, -2.0))
    chosen = [Chosen(token, -1.0, top) for token in (0, 1, 2, 3)]
    run.choices = [Choice(run._ask, text="€x", tokens=chosen, finish="length")]
    if stream:
        run.choices = [Choice(run._ask)]
        pieces = zip(("", "", "€", "x"), chosen, strict=True)
        events = [(0, Token(text, picked)) for text, picked in pieces]

        async def told():
            async def each():
                for event in events:
                    yield event

            run.events = each
            return [chunk["choices"][0]["logprobs"] async for chunk in completion_stream(run)]

        parts = asyncio.run(told())
        said = {name: [part[name][0] for part in parts] for name in parts[0]}
    else:
        said = completion_whole(run)["choices"][0]["logprobs"]
    assert said["text_offset"] == [0, 0, 0, 1]
    assert said["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "x"]
    assert said["top_logprobs"] == [{"bytes:\\xe2": -1.0, "bytes:\\x82": -2.0}] * 4


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-12, 1e-7])
@pytest.mark.parametrize("more", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_the_coldest_temperatures_say_the_most_likely_token(temperature, more):
    logits = torch.linspace(-80.0, 90.0, 50)[torch.randperm(50)]
    sampler = Sampler(Sampling(temperature=temperature, seed=1, **more), [])
    assert sampler.pick(logits).token == int(logits.argmax())
    forbidden = logits.masked_fill(logits > 0, -torch.inf)
    assert sampler.pick(forbidden).token == int(forbidden.argmax())


@pytest.mark.parametrize("top_p", [1e-320, 1e-45, 1e-9])
def test_the_least_share_has_the_most_likely_token(top_p):
    """None was left, and the request failed."""
    logits = torch.linspace(-8.0, 9.0, 50)[torch.randperm(50)]
    assert Sampler(Sampling(top_p=top_p, seed=1), []).pick(logits).token == int(logits.argmax())


def test_penalties_and_biases_are_those_of_each_token():
    """Told of all of them at once: one by one a thousand took as long as a row of a step."""
    wanted = Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: -7.0, 9: 2.0})
    sampler, logits = Sampler(wanted, []), torch.linspace(0, 1, 12)
    for token in (3, 5, 5, 11):
        sampler.take(token, logits)
    changed = {3: -0.75 - 7, 5: -0.5 - 0.5, 9: 2.0, 11: -0.75}
    expected = torch.tensor([float(logits[i]) + changed.get(i, 0.0) for i in range(12)])
    assert torch.allclose(sampler._scores(logits), expected)


@pytest.mark.parametrize(
    ("continues", "changed"), [(True, {3: -1, 5: -1.25, 8: -1}), (False, {5: -1.25})]
)
def test_what_a_completion_continues_is_present_and_was_not_said(continues, changed):
    """Its prompt's tokens count as present, each once; how often is of what was generated."""
    wanted = Sampling(0.0, presence_penalty=1.0, frequency_penalty=0.25, continues=continues)
    sampler, logits = Sampler(wanted, [3, 8, 8, 8]), torch.linspace(0, 1, 12)
    sampler.take(5, logits)
    expected = torch.tensor([float(logits[i]) + changed.get(i, 0.0) for i in range(12)])
    assert torch.allclose(sampler._scores(logits), expected)
