"""The commands of docs/engines.md as a reader copies them, with other places in them."""

import itertools
import json
import re
import shlex
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"


def arguments(flag: str, **places: str) -> list[dict]:
    """Of each use of that flag on the page, in order: its JSON. `places`: what stands on the page, by what
    is to stand there."""
    found = []
    for words in commands():
        for word, value in itertools.pairwise(words):
            if word == flag:
                found.append(json.loads(placed(value, places)))
    return found


def commands() -> list[list[str]]:
    """The words of each block of commands on the page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(text.replace("\\\n", " "), comments=True) for text in blocks]


def placed(value: str, places: dict[str, str]) -> str:
    for before, after in places.items():
        value = value.replace(f'"{before}"', json.dumps(after))
    return value


def words_behind(command: str, **places: str) -> list[str]:
    """The arguments of that command, as the page's first block with it ends with them."""
    start = command.split()
    for words in commands():
        for i in range(len(words)):
            if words[i : i + len(start)] == start:
                return [placed(word, places) for word in words[i + len(start) :]]
    raise AssertionError(f"{command} is not on the page")


def block(number: int, language: str = "sh") -> str:
    """The number-th block of that language on the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[number]


def lines(language: str) -> str:
    """The first block of that language on the page."""
    return re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
