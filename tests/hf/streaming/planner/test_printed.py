"""Proves what the command prints: the answer while it comes, and behind it what it took, with the ceiling.

Method: a tiny checkpoint with tokens of one number each; the command with and without drafts, beside what
--json says; a prompt of which the first tokens were cut; --help.
"""

import io
import json
import re

import pytest
import torch
import transformers

from kvclient.hf.streaming import Admission, StreamingCausalLM, StreamingConfig, __main__, close_streams
from kvclient.hf.streaming.device.runtime import Reading
from kvclient.hf.streaming.progress import Answer, summary
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint
from tests.hf.streaming.planner.test_command import Letters

PROMPT = "a prompt, a prompt, a"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("packed"), tiny_llama(), 32)


@pytest.fixture
def command(home, monkeypatch, capsys):
    """`command(*flags)`: the exit status, and both outputs."""
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Letters())

    def run(*flags, prompt=PROMPT):
        flags = ("--prompt", prompt, "--residency", "full_stream", *flags)
        monkeypatch.setattr("sys.argv", ["it", str(home), *flags])
        return __main__.main(), *capsys.readouterr()

    return run


def test_what_it_took_is_printed_with_the_ceiling_beside_it(command):
    status, out, err = command()
    assert status == 0
    said = json.loads(command("--json")[1])
    assert out == f"{said['text']}\n" and (said["tokens"], said["prompt_tokens"]) == (16, len(PROMPT))
    last = said["first_token_s"] + 15 * said["token_s"]
    assert 0 < said["first_token_s"] < last <= 16 / said["tokens_per_s"] * 1.001
    assert said["prompt_cut"] == 0
    first = rf"loaded in [\d.]+ s; a prompt of {len(PROMPT)} tokens; the first token after \d+\.\d\d s, "
    first += r"each behind it \d+\.\d{3} s\n16 tokens, [\d.]+ a second; the reads alone would allow"
    assert re.search(first, err)
    assert re.search(r"the disk was busy for \d+% of the time; layers took .* and were waited for", err)


def test_the_memory_that_the_model_took_is_without_the_interpreters_and_files(command, monkeypatch):
    """Else it is more than --memory, which is the model's."""
    readings = iter([Reading(300 << 20, 310 << 20, 90 << 20), Reading(350 << 20, 420 << 20, 130 << 20)])
    monkeypatch.setattr(__main__, "of_process", lambda: next(readings))
    assert command()[2].endswith("the model took 80 MiB at most\n")


def test_drafts_are_told_of_in_full(command):
    status, out, err = command("--draft", "lookup", "--max-new-tokens", "40")
    told = json.loads(command("--draft", "lookup", "--max-new-tokens", "40", "--json")[1])["speculation"]
    assert status == 0 and out == command("--max-new-tokens", "40")[1]
    assert set(told) == {
        "passes", "drafted_passes", "drafted", "accepted", "tokens_per_pass", "acceptance", "speed_up", "off",
    }  # fmt: skip
    wanted = r"a second; the reads alone would allow [\d.]+, at one token a pass\n(.*\n)+"
    wanted += r"\d+ of \d+ passes had a draft: [\d.]+ tokens a pass, \d+% of the drafts right, "
    wanted += r"[\d.]+ x one token a pass\n$"
    assert re.search(wanted, err)


def test_why_nothing_was_drafted_is_said():
    found = {
        "loaded_s": 1.0, "prompt_tokens": 5, "prompt_cut": 0, "first_token_s": 0.5, "token_s": None,
        "tokens": 1, "tokens_per_s": 2.0, "ceiling_tokens_per_s": None, "taken_bytes": None, "stats": {},
        "speculation": {"off": "window"},
    }  # fmt: skip
    assert summary(found, "disk") == [
        "loaded in 1.0 s; a prompt of 5 tokens; the first token after 0.50 s",
        "1 tokens, 2.00 a second; nothing is read",
        "no drafts, one token a pass: window",
    ]


def test_a_prompt_that_was_cut_does_not_count_as_the_answer(command, home):
    """Tokens were counted from the prompt as it was given: fewer than none, and the text was the prompt's."""
    plain = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))
    memory = str(Admission(plain, 1 << 40, 40).estimate(40, 3).bytes)
    close_streams(plain)
    prompt, flags = "x" * 600, ("--auto-truncate", "--max-new-tokens", "3", "--memory", memory)
    said = json.loads(command(*flags, "--json", prompt=prompt)[1])
    assert said["tokens"] == 3 and len(said["text"].split()) == 3 and said["tokens_per_s"] > 0
    assert 0 < said["prompt_tokens"] == len(prompt) - said["prompt_cut"] < len(prompt)
    assert f"tokens ({said['prompt_cut']} before them were cut);" in command(*flags, prompt=prompt)[2]


class Pieces:
    """Token 9 is a half of a letter; behind 7 it says another text than before."""

    def decode(self, ids, skip_special_tokens):
        found = ids.tolist()
        text = "".join(chr(97 + token) for token in found if token not in (7, 9))
        return "-" * (7 in found) + text + ("", "\ufffd", "é")[found.count(9)]


def test_an_answer_is_printed_as_it_comes():
    out, ids = io.StringIO(), torch.tensor([[50, 51]])
    with Answer(Pieces(), out) as answer:
        seen = []
        for token in (1, 2, 9, 9):
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
            assert answer(ids, None).tolist() == [False]
            seen.append(out.getvalue())
        assert seen == ["b", "bc", "bc", "bcé"]
        assert answer.end(ids) == "bcé"
    assert out.getvalue() == "bcé\n" and answer.prompt == 2 and len(answer.times_s) == 4
    out = io.StringIO()
    with Answer(Pieces(), out) as answer:  # what it said is taken back: said once more, whole
        answer(ids[:, :3], None)
        assert answer.end(torch.tensor([[50, 51, 1, 7]])) == "-b"
    assert out.getvalue() == "b\n-b\n"
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Answer(Pieces(), out) as answer:
        answer(ids[:, :3], None)
        raise KeyboardInterrupt
    assert out.getvalue() == "b\n"  # "interrupted" stands on a line of its own


def test_every_option_says_what_it_is_for(capsys):
    actions = __main__.parser()._actions
    assert len(actions) > 18 and all(action.help for action in actions)
    with pytest.raises(SystemExit):
        __main__.parser().parse_args(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "default: 16" in said and "default: 'The capital of France is'" in said and "default: 15" in said


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--host-threads", "2"), "--host-threads 2: only beside --device cuda"),
        (("--keep-last-k", "0"), "--keep-last-k 0: of --residency partial_resident, not full_stream"),
        (("--branches", "3"), "--branches 3, --nodes None: of --draft"),
        (("--nodes", "3"), "--branches None, --nodes 3: of --draft"),
        (("--draft", "lookup", "--branches", "9"), r"branches=9; it must be an integer in 1\.\.8"),
        (("--draft", "lookup", "--nodes", "0"), r"nodes=0; it must be an integer in 1\.\.255"),
    ],
)
def test_what_would_do_nothing_is_refused(command, flags, said):
    status, _, err = command(*flags)
    assert status == 1 and re.search(f"^error: {said}", err)
