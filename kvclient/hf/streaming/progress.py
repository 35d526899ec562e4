"""What the command says while it works: how far loading is, the answer as it comes, and what that took.

Owns lines on a terminal and the seconds between tokens. Never computes. Invariant: where an answer ends, all
of its text has been printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import torch
from transformers import StoppingCriteria

PART_OF_A_LETTER = "\ufffd"  # what a tokenizer gives for a token that ends inside of one


class Step:
    """A line that says how far a step of loading has come, its rate and how long it will take."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: tuple[float, int] | None = None  # when it was told, and of how much

    def __call__(self, done: int, whole: int) -> None:
        now = time.perf_counter()
        began, first = self._first = self._first or (now, done)
        line = f"\r{self._name}: {done / 2**20:.0f} of {whole / 2**20:.0f} MiB"
        if 100 * (done - first) >= whole:  # of less no rate is known: hours were said to be left
            rate = (done - first) / max(now - began, 1e-3)
            line += f", {rate / 2**20:.0f} MiB/s, {(whole - done) / rate:.0f} s left "
        print(line, end="\n" if done == whole else "", file=sys.stderr, flush=True)


class Answer(StoppingCriteria):
    """The new tokens of one row, as generate() asks behind each of them whether it is enough: of drafts, too,
    one by one. It never is. tokenizer: decodes them; out: where their text goes meanwhile; None: nowhere.
    """

    def __init__(self, tokenizer: Any, out: TextIO | None) -> None:
        self.prompt = 0  # tokens that were computed of it
        self.times_s: list[float] = []  # of each token, from here on
        self._tokenizer, self._out, self._said = tokenizer, out, ""
        self._began = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        if not self.times_s:
            self.prompt = input_ids.shape[1] - 1
        self.times_s.append(time.perf_counter() - self._began)
        if self._out is not None:
            text = self.text(input_ids)
            if text.startswith(self._said) and not text.endswith(PART_OF_A_LETTER):
                self._say(text)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def text(self, ids: torch.Tensor) -> str:
        """Of the answer in ids [1, prompt and answer]."""
        return str(self._tokenizer.decode(ids[0, self.prompt :], skip_special_tokens=True))

    def end(self, ids: torch.Tensor) -> str:
        """The whole text of ids [1, prompt and answer], whose rest is printed."""
        text = self.text(ids)
        if not text.startswith(self._said):  # a tokenizer that takes back what it said: once more, whole
            if self._out is not None:
                print(file=self._out)
            self._said = ""
        self._say(text)
        return text

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._out is not None and (kind is None or self._said):
            print(file=self._out, flush=True)

    def _say(self, text: str) -> None:
        if self._out is not None:
            print(text[len(self._said) :], end="", file=self._out, flush=True)
        self._said = text

    def took(self) -> dict[str, object]:
        """Tokens of the prompt; seconds to the first token, and of each one behind it, if any."""
        times = self.times_s
        later = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        return {"prompt_tokens": self.prompt, "first_token_s": times[0] if times else None, "token_s": later}


def expected(stats: Mapping[str, Any], pass_s: float | None) -> str:
    """What a token will take, as a line. stats: of streaming_stats(); pass_s: seconds; None: nothing read."""
    held, moved = stats["bytes_held"], stats["bytes_per_pass"]
    line = f"holds {held / 2**20:.0f} MiB, reads {moved / 2**20:.0f} MiB a token"
    if shared := stats.get("placement", {}).get("chosen", {}).get(1):
        line += f" but for {shared.get('host', 0)} of {sum(shared.values())} layers, which the host computes"
    return line + (f"; expects {1 / pass_s:.2f} tokens a second" if pass_s else "")


def summary(found: Mapping[str, Any], link: str) -> list[str]:
    """Lines about an answer. found: as the command's --json has it; link: over which weights come."""
    first = f"loaded in {found['loaded_s']:.1f} s; a prompt of {found['prompt_tokens']} tokens"
    if cut := found["prompt_cut"]:
        first += f" ({cut} before them were cut)"
    first += f"; the first token after {found['first_token_s']:.2f} s"
    if found["token_s"] is not None:
        first += f", each behind it {found['token_s']:.3f} s"
    ceiling, stats = found["ceiling_tokens_per_s"], found["stats"]
    most = "nothing is read"
    if ceiling:
        most = f"the reads alone would allow {ceiling:.2f}"
        most += ", at one token a pass" if "speculation" in found else ""
    lines = [first, f"{found['tokens']} tokens, {found['tokens_per_s']:.2f} a second; {most}"]
    if "link_share" in stats:
        computed, waited = sum(stats["computed_s"].values()), sum(stats["waited_s"].values())
        line = f"the {link} was busy for {stats['link_share']:.0%} of the time; layers took {computed:.1f} s"
        lines.append(f"{line} and were waited for {waited:.1f} s")
    if found["taken_bytes"] is not None:
        of_it = "" if link == "disk" else " of the device's memory"
        lines.append(f"the model took {found['taken_bytes'] / 2**20:.0f} MiB{of_it} at most")
    return lines + _drafted(found.get("speculation"))


def _drafted(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return []
    if told["off"] is not None:
        return [f"no drafts, one token a pass: {told['off']}"]
    line = f"{told['drafted_passes']} of {told['passes']} passes had a draft: {told['tokens_per_pass']:.2f} "
    line += f"tokens a pass, {told['acceptance']:.0%} of the drafts right"
    return [line + (f", {told['speed_up']:.2f} x one token a pass" if told["speed_up"] is not None else "")]
