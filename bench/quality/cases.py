"""Prompts that reuse what was computed behind other tokens, drawn from a half of the texts by a seed.

Owns the three kinds and the draw. Never runs a model. Invariant: case `number` of a kind is the same however
many are drawn, as long as the texts are (bench.quality.texts.digest).

    in context   a document, computed inside a prompt, behind another beginning
    alone        a document, computed alone, behind a beginning
    swapped      two documents, computed in one order, asked in the other

Each has three questions, which share all that stands before them: what follows the document, what follows the
other document (or stands elsewhere in the same text), and what stands elsewhere again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.quality.texts import Text

KINDS = ("in context", "alone", "swapped")
QUESTIONS = 3
# Of the draw. Each is used until a factor of the estimate is chosen anew, and then no more.
DRAW = 23
QUESTION, ANSWER = 20, 32  # tokens
# Of a document. Moved ones are of the length that reuse is for; two that are swapped make a prompt as long.
SIZES = {"in context": (800, 1200), "alone": (800, 1200), "swapped": (250, 450)}
SHORT = (250, 500)  # for moved ones: at this length what stands around them is a fifth of the prompt
WEIGHTS = {"code": 4, "manual": 4, "licence": 2}

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Case:
    kind: str
    number: int
    names: tuple[str, ...]  # of the documents, the last one first
    stored: list[int]  # what is computed before
    ids: list[int]  # the prompt without its question
    questions: list[tuple[list[int], list[int]]]  # and their answers

    @property
    def key(self) -> str:
        return f"{self.kind} {self.number}"


def draw(kind: str, number: int, texts: list[Text], encode: Encode, short: bool = False) -> Case:
    """encode: text to token ids. short: moved documents of SHORT tokens. Deterministic."""
    sizes = SHORT if short and kind != "swapped" else SIZES[kind]
    chance = random.Random(f"{DRAW} {kind} {number}")
    picked = _pick(chance, texts, 3 if kind == "swapped" else 2)
    around = encode(picked[-1].text[:4000])
    wholes = [encode(text.text) for text in picked[:-1]]
    parts = [_stretch(chance, whole, chance.randint(*sizes)) for whole in wholes]
    before = around[150 : 150 + chance.randint(1, 127)]
    body, behind = parts[0]
    follows = [behind, parts[-1][1] if kind == "swapped" else _elsewhere(chance, wholes[0])]
    follows.append(_elsewhere(chance, wholes[0]))
    names = tuple(text.name for text in picked[:-1])
    if kind == "swapped":
        stored, ids = around[:40] + body + parts[1][0] + around[100:140], before + parts[1][0] + body
    else:
        stored = body if kind == "alone" else around[:40] + body + around[100:140]
        ids = before + body
    questions = [(tokens[:QUESTION], tokens[QUESTION:]) for tokens in follows]
    return Case(kind, number, names, stored, ids, questions)


def _pick(chance: random.Random, texts: list[Text], count: int) -> list[Text]:
    """So many different ones, a kind of text by its weight first."""
    picked: list[Text] = []
    while len(picked) < count:
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        text = chance.choice([text for text in texts if text.kind == kind])
        if text not in picked:
            picked.append(text)
    return picked


def _stretch(chance: random.Random, whole: list[int], size: int) -> tuple[list[int], list[int]]:
    """(a document of `size` tokens somewhere in the text, the tokens that follow it)."""
    start = chance.randrange(max(1, len(whole) - size - QUESTION - ANSWER))
    part = whole[start : start + size + QUESTION + ANSWER]
    return part[: -QUESTION - ANSWER], part[-QUESTION - ANSWER :]


def _elsewhere(chance: random.Random, whole: list[int]) -> list[int]:
    return _stretch(chance, whole, 0)[1]
