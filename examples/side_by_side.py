"""What the reuse examples share: the engine on a daemon, and an answer beside that of plain generate().

--model DIR   another model than SmolLM2
--dir DIR     the runtime directory of a running daemon; without, one is started for this example
--tokens N    of each answer
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", metavar="DIR", help="another model than SmolLM2 135M")
    made.add_argument("--dir", help="of a running daemon; without, one is started for this run")
    made.add_argument("--tokens", type=int, default=8, metavar="N", help="of each answer; default 8")
    return made


@contextlib.contextmanager
def engine(chosen: argparse.Namespace, **options: Any) -> Iterator[Any]:
    """A kvclient.hf.Engine on the daemon of --dir, or on one that ends with it."""
    import torch  # not before --help
    import transformers

    import kvclient
    import kvclient.hf

    if chosen.model is None:
        import model as example_model

        chosen.model = example_model.ensure()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        home = chosen.dir
        if home is None:
            import own_daemon

            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstored-example-"))
            stack.enter_context(own_daemon.running(home))
        try:
            client = stack.enter_context(kvclient.connect(dir=home))
        except kvclient.Unavailable as error:
            raise SystemExit(f"no daemon answers in {home}: {error}") from None
        made = kvclient.hf.Engine.from_pretrained(chosen.model, client, dtype=torch.float32, **options)
        with made:
            made.answer_tokens = chosen.tokens
            yield made


def text_of(topic: str, characters: int, start: int = 0) -> str:
    """A real text that every Python has: a chapter of its own language reference."""
    from pydoc_data.topics import topics

    return topics[topic][start : start + characters]


def ask(engine: Any, label: str, prompt: Any) -> Asked:
    """The answer with reuse. Prints one line: TTFT of plain generate() and of this, and what was reused."""
    baseline = engine.generate(prompt, engine.answer_tokens, "baseline")
    result = engine.generate(prompt, engine.answer_tokens)
    report = result.report
    same = result.tokens == baseline.tokens
    print(
        f"{label:28} {result.prompt_tokens:5} tokens   baseline {baseline.ttft_s:6.2f} s   with the store "
        f"{result.ttft_s:6.2f} s   exact {report.reused_tokens:5}, moved {report.approximate_tokens:5}, "
        f"of those repaired {report.recomputed_tokens:4}   {'the same answer' if same else 'another answer'}",
        flush=True,
    )
    return Asked(result, baseline.text, same)


class Asked:
    """A result, the text of plain generate() beside it, and whether their tokens are the same."""

    def __init__(self, result: Any, plain: str, same: bool) -> None:
        self.result, self.plain, self.same, self.text = result, plain, same, result.text


def beside(asked: Asked) -> str:
    """Both answers, one above the other."""
    flat = (text.strip().replace("\n", " ") for text in (asked.plain, asked.text))
    return "    plain      {!r}\n    the store  {!r}".format(*flat)
