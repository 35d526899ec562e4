"""Answers of /v1/completions.

Owns the shapes. Never computes. Invariant: the pieces of a stream, put together, are the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvclient.serve.engine.job import Done, Prompt, Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.engine.text import UNFINISHED, Text
from kvclient.serve.http.answers.chat import token_bytes, token_text
from kvclient.serve.http.answers.run import Choice, Run, head, last_words, new_id, wants_usage


def completion_whole(run: Run) -> dict[str, Any]:
    """The answer of /v1/completions in one piece."""
    out = head(run, "cmpl", "text_completion", int(time.time()), new_id("cmpl"))
    choices = []
    for index, choice in enumerate(run.choices):
        text, logprobs = choice.text, None
        decode = run.asking.tokenizer.decode
        if choice.ask.echo:
            text = decode(choice.ask.prompt, skip_special_tokens=True) + text
        if choice.ask.sampling.logprobs is not None:
            logprobs = listed(run, choice, behind(run, choice))
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish})
    return {**out, "choices": choices, "usage": run.usage(), "kv_reuse": run.reuse()}


class Offsets:
    """Where in a text each of its tokens begins; of the pieces of a character, where that does. at: the
    characters before it. behind: the tokens of those.
    """

    def __init__(self, tokenizer: Any, at: int = 0, behind: Sequence[int] = ()) -> None:
        self._text, self._at = Text(tokenizer, behind=behind), at

    def of(self, token: int) -> int:
        """The next token's."""
        at = self._at
        self._at += len(self._text.add(token))
        return at


def named(tokenizer: Any, token: int, first: bool) -> str:
    """Its text; of a piece of a character its bytes, as OpenAI's API has it: their text is one for all.
    first: of a text, before which no space is told.
    """
    text = str(tokenizer.decode([token])) if first else token_text(tokenizer, token)
    values = token_bytes(tokenizer, token, text) if UNFINISHED in text else None
    if values is None or values == list(text.encode()):
        return text
    return "bytes:" + "".join(f"\\x{value:02x}" for value in values)


def behind(run: Run, choice: Choice) -> Offsets:
    """Of its answer."""
    tokenizer, ask = run.asking.tokenizer, choice.ask
    at = len(tokenizer.decode(ask.prompt, skip_special_tokens=True)) if ask.echo else 0
    return Offsets(tokenizer, at, ask.prompt)


def listed(run: Run, choice: Choice, answer: Offsets) -> dict[str, Any]:
    """logprobs as /v1/completions has them, of the prompt's tokens too where it is echoed. Of tokens that are
    spelled alike the likeliest is told."""
    tokenizer = run.asking.tokenizer
    rows: list[tuple[int, Chosen | None]] = []
    offsets: list[int] = []
    if choice.ask.echo and choice.prompt is not None:
        rows += list(zip(choice.ask.prompt, choice.prompt.logprobs, strict=True))
        offsets += map(Offsets(tokenizer).of, choice.ask.prompt)
    rows += [(chosen.token, chosen) for chosen in choice.tokens]
    offsets += [answer.of(chosen.token) for chosen in choice.tokens]
    first = [choice.ask.echo and at == 0 for at in offsets]
    words = [named(tokenizer, token, at) for (token, _), at in zip(rows, first, strict=True)]
    tops = [
        {named(tokenizer, token, at): p for token, p in reversed(chosen.top)} if chosen else None
        for (_, chosen), at in zip(rows, first, strict=True)
    ]
    tops = [top and dict(reversed(top.items())) for top in tops]
    logprobs = [chosen.logprob if chosen else None for _, chosen in rows]
    return {"tokens": words, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


async def completion_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    """The chunks of /v1/completions as they come."""
    base = head(run, "cmpl", "text_completion", int(time.time()), new_id("cmpl"))

    def chunk(index: int, text: str, finish: str | None = None, said: Any = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": said, "finish_reason": finish}
        return {**base, "choices": [choice]}

    answers = [behind(run, choice) for choice in run.choices]

    def logprobs(index: int, piece: Choice) -> dict[str, Any] | None:
        if piece.ask.sampling.logprobs is None:
            return None
        return listed(run, piece, answers[index])

    async for index, event in run.events():
        choice = run.choices[index]
        if isinstance(event, Prompt) and choice.ask.echo:
            text = run.asking.tokenizer.decode(choice.ask.prompt, skip_special_tokens=True)
            yield chunk(index, text, None, logprobs(index, Choice(choice.ask, prompt=event)))
        elif isinstance(event, Token):
            said = logprobs(index, Choice(choice.ask, tokens=[event.chosen]))
            if event.text or said:
                yield chunk(index, event.text, None, said)
        elif isinstance(event, Done):
            yield {**chunk(index, event.text, event.reason), **last_words(run)}
    if wants_usage(run):
        yield {**base, "choices": [], "usage": run.usage(), "kv_reuse": run.reuse()}
