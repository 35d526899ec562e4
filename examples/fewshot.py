"""Few-shot: the same examples before every input, computed once. Only the examples are published, not the
inputs.
"""

from side_by_side import engine, parser, text_of

INPUTS = ["the disk is full", "the daemon answers", "a key is missing"]


def main() -> None:
    with engine(parser(__doc__).parse_args(), repair=None, block_tokens=32) as llm:
        said = [
            sentence
            for sentence in text_of("execmodel", 1500).replace("\n", " ").split(". ")
            if len(sentence) > 40
        ]
        judged = zip(said, ["good", "bad"] * len(said), strict=False)
        shots = "".join(f"Text: {sentence[:90]}\nVerdict: {verdict}\n\n" for sentence, verdict in judged)
        prefix = len(llm.encode(shots))
        llm.warm(shots)
        for text in INPUTS:
            prompt = f"{shots}Text: {text}\nVerdict:"
            baseline = llm.generate(prompt, 2, "baseline")
            result = llm.generate(prompt, 2, cacheable_prefix_len=prefix)
            print(
                f"{text:20} {result.prompt_tokens:5} tokens   baseline {baseline.ttft_s:.2f} s   "
                f"with the store {result.ttft_s:.2f} s   exact {result.report.reused_tokens:5}"
            )


if __name__ == "__main__":
    main()
