"""Answers of /v1/chat/completions, and what a model's text is in them: words, thoughts, calls of tools.

Owns the shapes. Never computes. Invariant: the pieces of a stream, put together, are the whole answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

from kvclient.serve.engine.job import Done, Token
from kvclient.serve.engine.sampling import Chosen
from kvclient.serve.engine.text import UNFINISHED
from kvclient.serve.http.answers.run import Choice, Run, head, last_words, new_id, wants_usage
from kvclient.serve.http.asking import Ask
from kvclient.serve.http.reasoning import Reasoning, parted
from kvclient.serve.http.schema import ChatRequest
from kvclient.serve.http.tools import ForcedCall, SpokenCalls, calls_in, forced_call

SPACE = "\u2581"  # what stands for a space in vocabularies of SentencePiece's kind


def chat_whole(run: Run) -> dict[str, Any]:
    """The answer of /v1/chat/completions in one piece."""
    out = head(run, "chatcmpl", "chat.completion", int(time.time()), new_id("chatcmpl"))
    choices = []
    for index, choice in enumerate(run.choices):
        message, finish = chat_message(choice)
        logprobs = None
        if choice.ask.sampling.logprobs is not None:
            told = (spelled(run, chosen, begins(choice, at)) for at, chosen in enumerate(choice.tokens))
            logprobs = {"content": list(told)}
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    return {**out, "choices": choices, "usage": run.usage(), "kv_reuse": run.reuse()}


def chat_message(choice: Choice) -> tuple[dict[str, Any], str | None]:
    """(the message, why it ended): reasoning and calls of tools apart from the text."""
    (thought, text), calls = (None, choice.text), []
    if choice.ask.reasoning is not None:
        thought, text = parted(text, choice.ask.reasoning)
    if choice.ask.forced_tool:
        calls = forced_call(text)
        text = "" if calls else text
    elif choice.ask.tools:
        text, calls = calls_in(text, *offered(choice.ask))
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
        return message, "tool_calls" if choice.finish == "stop" else choice.finish
    return message, choice.finish


async def chat_stream(run: Run) -> AsyncIterator[dict[str, Any]]:
    """The chunks of /v1/chat/completions as they come."""
    base = head(run, "chatcmpl", "chat.completion.chunk", int(time.time()), new_id("chatcmpl"))

    def chunk(
        index: int, delta: dict[str, Any], finish: str | None = None, said: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": said, "finish_reason": finish}
        return {**base, "choices": [choice]}

    heard = [listeners(choice.ask) for choice in run.choices]
    for index, _ in enumerate(run.choices):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for index, event in run.events():
        choice, ended = run.choices[index], isinstance(event, Done)
        if not isinstance(event, Token | Done):
            continue
        said = None
        if isinstance(event, Token) and choice.ask.sampling.logprobs is not None:
            said = {"content": [spelled(run, event.chosen, begins(choice, len(choice.tokens) - 1))]}
        for delta in deltas(event.text, *heard[index], bool(said), ended):
            yield chunk(index, delta, None, said)
            said = None
        if ended:
            yield {**chunk(index, {}, chat_message(choice)[1]), **last_words(run)}
    last = {**base, "choices": [], "usage": run.usage(), "kv_reuse": run.reuse()}
    if wants_usage(run):
        yield last


def listeners(ask: Ask) -> tuple[Reasoning | None, ForcedCall | SpokenCalls | None]:
    """What reads its text as it grows."""
    thinking = None if ask.reasoning is None else Reasoning(ask.reasoning)
    if ask.forced_tool:
        return thinking, ForcedCall()
    return thinking, SpokenCalls(*offered(ask)) if ask.tools else None


def deltas(
    text: str, thinking: Reasoning | None, calling: ForcedCall | SpokenCalls | None, always: bool, ended: bool
) -> list[dict[str, Any]]:
    """Of one piece. always: also an empty one, for what stands beside it."""
    thought = ""
    if thinking is not None:
        thought, text = thinking.add(text)
        rest = thinking.end() if ended else ("", "")
        thought, text = thought + rest[0], text + rest[1]
    out: list[dict[str, Any]] = [{"reasoning_content": thought}] if thought else []
    if calling is not None:
        out += calling.add(text, ended)
    elif text:
        out.append({"content": text})
    return out or ([{"content": ""}] if always else [])


def whole_deltas(choice: Choice) -> list[dict[str, Any]]:
    """Of its whole text: words around calls stay apart, in their order."""
    return deltas(choice.text, *listeners(choice.ask), False, True)


class Offered(NamedTuple):
    """What SpokenCalls wants to know."""

    tools: dict[str, Any]  # the schemas of their parameters, by name
    most: int | None
    strict: set[str]


def offered(ask: Ask) -> Offered:
    """Its tools, how many calls an answer may have (None: any number), and whose calls a grammar
    keeps to their schemas. In an answer of response_format's schema none of a strict tool is read.
    """
    asked = cast(ChatRequest, ask.request)  # no other has tools
    most = 1 if asked.parallel_tool_calls is False else None
    functions = [tool.function for tool in asked.tools if not (ask.constrained and tool.function.strict)]
    strict = {function.name for function in functions if function.strict and ask.strict_tools}
    return Offered({function.name: function.parameters for function in functions}, most, strict)


def begins(choice: Choice, at: int) -> bool:
    """Whether its token at that place is a text's first, before which no space is told."""
    return at == 0 and not cast(ChatRequest, choice.ask.request).continue_final_message


def spelled(run: Run, chosen: Chosen, first: bool) -> dict[str, Any]:
    """A token with its probability and those of the likeliest, as /v1/chat/completions has it. first: of a
    text.
    """
    tokenizer = run.asking.tokenizer

    def word(token: int, logprob: float | None) -> dict[str, Any]:
        text = str(tokenizer.decode([token])) if first else token_text(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": token_bytes(tokenizer, token, text)}

    return {**word(chosen.token, chosen.logprob), "top_logprobs": [word(*pair) for pair in chosen.top]}


def token_text(tokenizer: Any, token: int) -> str:
    """Its own, with the space that a word of SentencePiece's kind begins with: its decoder takes that for a
    text's first, and leaves it out."""
    text = str(tokenizer.decode([token]))
    word = str(tokenizer.convert_ids_to_tokens(token))
    spaces = len(word) - len(word.lstrip(SPACE))
    return text if text.startswith(" " * spaces) else f" {text}"


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """Those of a token that decodes to this text alone: of a piece of a character its own. None: its
    tokenizer does not say."""
    if UNFINISHED not in text:
        return list(text.encode())
    word = str(tokenizer.convert_ids_to_tokens(token))
    if UNFINISHED in word:
        return list(text.encode())
    if met := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", word):
        return [int(met[1], 16)]
    values = [BYTES.get(letter) for letter in word]
    return None if None in values else [value for value in values if value is not None]


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in vocabularies of bytes, as GPT-2's: itself where it is seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in seen]
    return {chr(value): value for value in seen} | {chr(256 + n): value for n, value in enumerate(others)}


BYTES = _letters()
