"""Retrieval: the same texts stand in many prompts, and are computed once.

By default each prompt begins with the same instruction and texts, and only the question is new: reuse is
exact, and every answer must be that of plain generate(). The exit status is 1 if one is not.

With --moved the texts stand in another order behind another instruction each time. They are found wherever
they stand, moved to their place and repaired. That is an approximation, and asked for: answers may differ.
"""

import sys

from side_by_side import ask, beside, engine, parser, text_of

DOCUMENTS = [text_of(name, 300) for name in ("with", "raise", "numeric-types")]
QUESTIONS = [
    ("Answer in one sentence.", (0, 1, 2), "What does the with statement do?"),
    ("You are a careful engineer. Use the texts below.", (2, 0, 1), "What does raise do?"),
    ("Read the following and be brief.", (1, 2), "Which numbers does Python have?"),
]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--moved", action="store_true", help="the texts in another order each time")
    chosen = options.parse_args()
    others = 0
    with engine(chosen, repair="auto" if chosen.moved else None, block_tokens=32) as llm:
        for document in DOCUMENTS if chosen.moved else ():
            warmed = llm.warm(document)
            print(f"warmed {warmed.tokens} tokens, {warmed.blocks} blocks. {warmed.note}")
        for instruction, order, question in QUESTIONS:
            first, texts = (instruction, order) if chosen.moved else QUESTIONS[0][:2]
            parts = [first, *(DOCUMENTS[i] for i in texts), f"Question: {question}\nAnswer:"]
            asked = ask(llm, question[:28], "\n\n".join(parts))
            print(beside(asked))
            others += not asked.same
    if others and not chosen.moved:
        print(f"NOT AS EXPECTED: {others} of {len(QUESTIONS)} answers differ from plain generate()")
    return 1 if others and not chosen.moved else 0


if __name__ == "__main__":
    sys.exit(main())
