"""System One's API: typed questions about a state, answered by probabilities. Nothing is generated.

Owns its names, its prompts and its answers. Never computes. Invariants: the state stands before the question,
so all questions of a state share its KV; the probabilities of a question's options sum to one, and are those
of the model for the first token of each option's label, behind the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import math
import string
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from kvclient.serve.errors import unprocessable, unsupported
from kvclient.serve.http.answers.run import Choice, Run
from kvclient.serve.http.asking import Ask, Asking
from kvclient.serve.http.schema import CacheOptions, CompletionRequest, Message, Strict

Content = str | dict[str, Any] | list[Any]
LETTERS = string.ascii_uppercase
YES_OR_NO = ("Yes", "No")


class NoulCriteria(Strict):
    true: Content | None = None
    false: Content | None = None


class Noul(Strict):
    """Yes or no: the probability of yes."""

    type: Literal["noul"]
    instructions: Content | None = None
    criteria: NoulCriteria | None = None


class Options(Strict):
    """One of several, by name."""

    type: Literal["choice"]
    instructions: Content | None = None
    criteria: dict[str, Content | None] = Field(min_length=1, max_length=len(LETTERS))


class Score(Strict):
    """A level of several, the lowest first."""

    type: Literal["score"]
    instructions: Content | None = None
    criteria: list[Content] = Field(min_length=1, max_length=10)


Question = Annotated[Noul | Options | Score, Field(discriminator="type")]


class DecisionRequest(Strict):
    model: str | None = None
    state: Content
    questions: dict[str, Question] = Field(min_length=1, max_length=64)
    assets: dict[str, Any] = Field({}, max_length=4)
    cache: CacheOptions = CacheOptions()


def decisions(asking: Asking, request: DecisionRequest) -> list[Ask]:
    """One for each question. Raises ApiError."""
    asking.check_model(request.model)
    if request.assets:
        raise unsupported("assets", "this server reads text")
    return [_ask(asking, request, question) for question in request.questions.values()]


def decision_whole(run: Run, request: DecisionRequest) -> dict[str, Any]:
    """The answer of /v1/systemone."""
    told = zip(request.questions.items(), run.choices, strict=True)
    answers = {name: _answer(question, _shares(choice)) for (name, question), choice in told}
    usage = run.usage()
    return {
        "model": run.asking.model_name, "answers": answers,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": 0,
                  "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
    }  # fmt: skip


def _ask(asking: Asking, request: DecisionRequest, question: Question) -> Ask:
    text = f"{_text(request.state)}\n\n{wording(question)}"
    if getattr(asking.tokenizer, "chat_template", None):
        prompt = asking.chat_tokens([Message(role="user", content=text)])
    else:
        prompt = asking.tokens(f"{text}\nAnswer: ")
    plain = CompletionRequest(
        prompt=prompt, max_tokens=1, temperature=0, ignore_eos=True, cache=request.cache
    )
    (ask,) = asking.completion(plain)
    tokens = _label_tokens(asking.tokenizer, _labels(question))
    return dataclasses.replace(ask, sampling=dataclasses.replace(ask.sampling, among=tokens))


def wording(question: Question) -> str:
    """The question as the model reads it, each option behind the label it answers with."""
    lines = [_text(question.instructions)] if question.instructions is not None else []
    labels = _labels(question)
    if isinstance(question, Noul):
        told = question.criteria or NoulCriteria()
        both = zip(labels, (told.true, told.false), strict=True)
        lines += [f"{label} means: {_text(what)}" for label, what in both if what is not None]
        return "\n".join([*lines, "Is that so? Say Yes or No, nothing else."])
    if isinstance(question, Options):
        named = [
            name if what is None else f"{name} ({_text(what)})" for name, what in question.criteria.items()
        ]
    else:
        named = [_text(level) for level in question.criteria]
    lines += [f"{label}: {what}" for label, what in zip(labels, named, strict=True)]
    return "\n".join([*lines, "Which one fits best? Say its letter, nothing else."])


def _labels(question: Question) -> Sequence[str]:
    return YES_OR_NO if isinstance(question, Noul) else LETTERS[: len(question.criteria)]


def _label_tokens(tokenizer: Any, labels: Sequence[str]) -> tuple[int, ...]:
    first = tuple(tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in labels)
    if len(set(first)) < len(first):
        raise unprocessable(f"this model's tokens do not tell {len(labels)} labels apart", "questions")
    return first


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _shares(choice: Choice) -> list[float]:
    """Of the labels among themselves."""
    logprobs = [logprob for _, logprob in choice.tokens[0].top]
    most = max(logprobs)
    weights = [math.exp(logprob - most) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def _answer(question: Question, shares: list[float]) -> dict[str, Any]:
    """confidence: 0 where all options are alike, 1 where one has all: of a choice how far its share is above
    an even one, of a score how near the levels lie to the likeliest, against even shares.
    """
    if isinstance(question, Noul):
        return {"type": "noul", "noul": shares[0]}
    count, best = len(shares), max(range(len(shares)), key=shares.__getitem__)
    if isinstance(question, Options):
        names, even = list(question.criteria), 1 / count
        confidence = 1.0 if count == 1 else max(0.0, (shares[best] - even) / (1 - even))
        told = {"type": "choice", "choice": names[best]}
    else:
        names, middle = [str(level) for level in range(count)], (count - 1) / 2
        spread = sum(share * abs(level - best) for level, share in enumerate(shares))
        even = sum(abs(level - middle) for level in range(count)) / count
        confidence = 1.0 if count == 1 else max(0.0, 1 - spread / even)
        expected = sum(level * share for level, share in enumerate(shares))
        legend = dict(zip(names, question.criteria, strict=True))
        told = {"type": "score", "score": expected, "legend": legend}
    return {**told, "confidence": confidence, "probabilities": dict(zip(names, shares, strict=True))}
