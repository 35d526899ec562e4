"""Many turns about one long text: the time to the first token stays flat while the conversation grows."""

from side_by_side import ask, engine, parser, text_of

TURNS = 4


def main() -> None:
    with engine(parser(__doc__).parse_args(), repair=None, block_tokens=32) as llm:
        conversation = text_of("with", 800)
        for turn in range(TURNS):
            conversation += f"\n\nUser: please explain sentence {turn + 1} of the text above.\nAssistant:"
            conversation += ask(llm, f"turn {turn + 1}", conversation).text


if __name__ == "__main__":
    main()
