"""Questions about a source file: the file is computed once, and used at the start of a prompt or in its
middle.
"""

import argparse
from pathlib import Path

from side_by_side import ask, engine, parser

SOURCE = Path(argparse.__file__).read_text(encoding="utf-8")[20_000:21_200]


def main() -> None:
    with engine(parser(__doc__).parse_args(), repair="auto") as llm:
        llm.warm(SOURCE)
        ask(llm, "file first", f"{SOURCE}\n# What does the class above do?\n#")
        ask(llm, "file first, another question", f"{SOURCE}\n# List its methods:\n#")
        ask(llm, "file in the middle", f'"""A review of some code. Be strict."""\n\n{SOURCE}\n# Review:\n#')


if __name__ == "__main__":
    main()
