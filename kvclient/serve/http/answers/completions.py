"""Answers of /v1/completions.

Owns the shapes. Never computes. Invariant: the pieces of a stream, put together, are the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from kvclient.serve.engine.job import Done, Prompt, Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.http.answers.chat import wants_usage
from kvclient.serve.http.answers.run import Choice, Run, head, new_id


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
            logprobs = listed(run, choice)
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish})
    return {**out, "choices": choices, "usage": run.usage(), "kv_reuse": run.reuse()}


def listed(run: Run, choice: Choice, at: int = 0) -> dict[str, Any]:
    """logprobs as /v1/completions has them, of the prompt's tokens too where it is echoed. at: characters of
    the tokens before these."""
    decode = run.asking.tokenizer.decode
    rows: list[tuple[int, Chosen | None]] = []
    if choice.ask.echo and choice.prompt is not None:
        rows += list(zip(choice.ask.prompt, choice.prompt.logprobs, strict=True))
    rows += [(chosen.token, chosen) for chosen in choice.tokens]
    words = [decode([token]) for token, _ in rows]
    offsets = []
    for word in words:
        offsets.append(at)
        at += len(word)
    tops = [{decode([token]): p for token, p in chosen.top} if chosen else None for _, chosen in rows]
    logprobs = [chosen.logprob if chosen else None for _, chosen in rows]
    return {"tokens": words, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


async def completion_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    """The chunks of /v1/completions as they come."""
    base = head(run, "cmpl", "text_completion", int(time.time()), new_id("cmpl"))

    def chunk(index: int, text: str, finish: str | None = None, said: Any = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": said, "finish_reason": finish}
        return {**base, "choices": [choice]}

    told = [0] * len(run.choices)  # characters of the tokens whose logprobs were told

    def logprobs(index: int, piece: Choice) -> dict[str, Any] | None:
        if piece.ask.sampling.logprobs is None:
            return None
        said = listed(run, piece, told[index])
        told[index] += sum(map(len, said["tokens"]))
        return said

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
            yield chunk(index, event.text, event.reason)
    if wants_usage(run):
        yield {**base, "choices": [], "usage": run.usage(), "kv_reuse": run.reuse()}
