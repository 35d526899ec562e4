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
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        for word, value in itertools.pairwise(words):
            if word == flag:
                for before, after in places.items():
                    value = value.replace(f'"{before}"', json.dumps(after))
                found.append(json.loads(value))
    return found


def lines(language: str) -> str:
    """The first block of that language on the page."""
    return re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
