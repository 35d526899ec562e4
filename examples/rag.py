"""Retrieval: three documents, put into each prompt in another order behind another instruction.

Each document is computed once, alone. Then it is found wherever it stands, moved to its place and repaired.
"""

from side_by_side import ask, engine, text_of

DOCUMENTS = [text_of(name, 2000) for name in ("docs/design.md", "docs/tour.md", "docs/formats.md")]
QUESTIONS = [
    ("Answer in one sentence.", (0, 1, 2), "Who changes the index?"),
    ("You are a careful engineer. Use the texts below.", (2, 0, 1), "What is a segment?"),
    ("Read the following and be brief.", (1, 2), "How does a get work?"),
]


def main() -> None:
    with engine(__doc__, repair="auto") as llm:
        for document in DOCUMENTS:
            warmed = llm.warm(document)
            print(f"warmed {warmed.tokens} tokens, {warmed.blocks} blocks. {warmed.note}")
        for instruction, order, question in QUESTIONS:
            parts = [instruction, *(DOCUMENTS[i] for i in order), f"Question: {question}\nAnswer:"]
            ask(llm, question, "\n\n".join(parts))


if __name__ == "__main__":
    main()
