"""A chat: each turn's prompt is all that was said, and only the new words are computed. Type, or --tokens 8 <
/dev/null.

Without input it asks itself three things.
"""

import sys

from side_by_side import ask, engine, parser

SELF = ["What is a cache?", "And who uses one?", "Say it shorter."]


def main() -> None:
    with engine(parser(__doc__).parse_args(), repair=None, block_tokens=32) as llm:
        chat = [{"role": "system", "content": "You are a friendly assistant that answers in one sentence."}]
        for said in sys.stdin if sys.stdin.isatty() else SELF:
            chat.append({"role": "user", "content": said.strip()})
            result = ask(llm, said.strip()[:28], chat)
            chat.append({"role": "assistant", "content": result.text})
            print("   ", result.text.strip().replace("\n", " "))


if __name__ == "__main__":
    main()
