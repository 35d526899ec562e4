"""Proves where settings come from: a file, below the environment, below flags; each wrong one is named, and
docs/serving.md has them all, with every field of a request.

Method: the command lines of the server and the router, with files and environments of every kind.
"""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest

from kvclient.hf.reuse.repair import METHODS
from kvclient.serve.__main__ import BOUNDS, REPAIRS, first_token, main, options, parser, size
from kvclient.serve.engine.job import Done
from kvclient.serve.http import decisions, messages, responses, schema
from kvclient.serve.route import command
from kvclient.serve.scheduler import Limits
from tests.conftest import ROOT


def test_a_file_is_below_the_environment_and_that_below_flags(tmp_path, monkeypatch):
    file = tmp_path / "serve.toml"
    file.write_text('max-batch-size = 3\nmax_queue = 7\nport = 1\nstore = "1GiB"\napi-key = ["a", "b"]\n')
    monkeypatch.setenv("KVCLIENT_SERVE_MAX_QUEUE", "8")
    monkeypatch.setenv("KVCLIENT_SERVE_PORT", "2")
    monkeypatch.setenv("KVCLIENT_SERVE_LISTEN_BEYOND_LOOPBACK", "false")
    settings = options(["m", "--config", str(file), "--port", "3"])
    assert (settings.max_batch_size, settings.max_queue, settings.port, settings.store) == (3, 8, 3, 1 << 30)
    assert settings.api_key == ["a", "b"] and settings.listen_beyond_loopback is False
    monkeypatch.setenv("KVCLIENT_SERVE_CONFIG", str(file))
    assert options(["m"]).max_batch_size == 3
    monkeypatch.setenv("KVCLIENT_SERVE_API_KEY", "c d")
    assert options(["m"]).keys == [b"c", b"d"], "what is above is there instead, and not beside it"
    assert options(["m", "--api-key", "e", "--api-key", "f"]).keys == [b"e", b"f"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("beams = 2", "beams"),
        ('dtype = "int3"', "dtype"),
        ("max-queue = 0", "max-queue"),
        ('max-queue = "many"', "max-queue"),
        ("port = 99999", "port"),
        ('api-key = "a"', "api-key"),
        ('listen-beyond-loopback = "perhaps"', "listen-beyond-loopback"),
        ("= 3", "config"),
        (None, "config"),
        ("memory-tokens = 0", "memory-tokens"),
        ("request-timeout = nan", "request-timeout"),
        ("request-timeout = -1", "request-timeout"),
        ("threads = -2", "threads"),
        ("max-model-len = 0", "max-model-len"),
        ("draft-tokens = 65", "draft-tokens"),
        ('store = "1KiB"', "store"),
        ('repair = "mend"', "repair"),
        ('chunker = "word"', "chunker"),
        ('quantization = "int3"', "quantization"),
        ("sink-tokens = 8", "--repair calibrated"),
        ('sink-tokens = 8\nrepair = "auto"', "--repair auto"),
        ('kv-codec = "int8"\nchunker = "sentence"', "--chunker sentence"),
        ('sink-tokens = -1\nrepair = "auto"', "sink-tokens"),
        ('warm = "/dev/null"', "no text"),
        ('warm = "/nowhere"', "--warm /nowhere"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, capsys, text, word):
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        options(["m", "--config", str(file)])
    assert ended.value.code == 2 and word in capsys.readouterr().err


def test_a_variable_that_is_nearly_a_settings_is_refused_and_a_services_is_not_taken(monkeypatch, capsys):
    """A Service of Kubernetes named kvclient-serve sets these in every pod of its namespace."""
    for name, text in {"SERVICE_HOST": "10.0.0.7", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP": "80",
                       "PORT": "tcp://10.0.0.7:80", "PORT_80_TCP": "tcp://10.0.0.7:80",
                       "PORT_80_TCP_PROTO": "tcp", "PORT_80_TCP_PORT": "80",
                       "PORT_80_TCP_ADDR": "10.0.0.7"}.items():  # fmt: skip
        monkeypatch.setenv(f"KVCLIENT_SERVE_{name}", text)
    assert options(["m"]).port == 8000
    monkeypatch.setenv("KVCLIENT_SERVE_MAX_QEUE", "3")
    with pytest.raises(SystemExit) as ended:
        options(["m"])
    told = "KVCLIENT_SERVE_MAX_QEUE is no setting; the nearest is KVCLIENT_SERVE_MAX_QUEUE"
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_every_number_is_bounded_and_every_repair_is_one():
    numbers = {a.dest for a in parser()._actions if a.type in (int, float, size)} - {"port"}
    assert numbers == set(BOUNDS)
    assert {*REPAIRS} == {"calibrated", *METHODS} == {*get_args(schema.Repair)}


TOLD = """import os, sys
from kvclient.serve.__main__ import main
main(["m", "--print-config"])
print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))"""


@pytest.mark.parametrize(
    ("more", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_that_wait_sleep_soon_and_hear_of_it_before_torch_is_there(more, spins):
    plain = {name: v for name, v in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = {"cwd": ROOT, "env": {**plain, **more}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", TOLD], **run)
    assert done.stdout.splitlines()[-1] == f"False {spins}", done.stderr


@pytest.mark.parametrize(("longest", "memory", "computed"), [(10, 99, 9), (99, 8, 7), (99, 99, 20)])
def test_of_a_text_to_be_warmed_the_beginning_is_computed(longest, memory, computed):
    taken = []

    def submit(job):
        taken.extend(job.prompt)
        job.tell(Done("length", ""))

    loop = SimpleNamespace(submit=submit, limits=Limits(memory_tokens=memory))
    asking = SimpleNamespace(tokens=lambda text: [*range(20)], max_tokens=longest, loop=loop, tokenizer=None)
    first_token(asking, "text")
    assert taken == [*range(computed)]


@pytest.mark.parametrize("made", [parser, command.parser])
def test_every_flag_is_documented(made):
    text = (ROOT / "docs" / "serving.md").read_text()
    flags = {flag for action in made()._actions for flag in action.option_strings if flag.startswith("--")}
    missing = {flag for flag in flags - {"--help"} if not re.search(rf"{flag}(?![\w-])", text)}
    assert not missing


ASKED = (
    schema.ChatRequest, schema.CompletionRequest, schema.TokenizeRequest, schema.DetokenizeRequest,
    schema.WarmRequest, schema.CacheOptions, schema.WindowOptions, schema.StreamOptions,
    schema.ResponseFormat, responses.ResponsesRequest, messages.Counted, messages.MessagesRequest,
    decisions.DecisionRequest,
)  # fmt: skip


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_every_field_is_documented(kind):
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "serving.md").read_text(), flags=re.S)
    told = " ".join(re.findall(r"`([^`]+)`", text))
    names = {field.alias or name for name, field in kind.model_fields.items()}
    assert not {name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", told)}


def test_awq_is_wanted_where_none_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="no AWQ checkpoint"):
        main([str(tmp_path), "--quantization", "awq", "--store", "1MiB", "--port", "0"])


@pytest.mark.parametrize(
    ("model", "flags", "reason"),
    [
        ("/nowhere/at/all", [], "/nowhere/at/all is not there"),
        ("{tmp}/no.gguf", [], "no.gguf is not there"),
        ("{tmp}", [], "has no config.json"),
        ("{tmp}/bad.gguf", [], "bad.gguf does not start with the GGUF magic"),
        ("{home}", ["--device", "cpu:none"], "device='cpu:none'"),
        ("{home}", ["--draft", "/nowhere"], "/nowhere is not there"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(home, tmp_path, capsys, model, flags, reason):
    (tmp_path / "bad.gguf").write_text("{")
    named = model.format(tmp=tmp_path, home=home)
    assert main([named, *flags, "--store", "1MiB", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kvclient-serve: {named} cannot be served: ") and reason in said
    assert said.count("\n") == 1


def test_a_daemon_that_is_not_there_is_said(tmp_path, capsys):
    main([str(tmp_path), "--dir", str(tmp_path / "none"), "--port", "0"])
    assert f"no daemon answers in {tmp_path / 'none'}" in capsys.readouterr().err


def test_keys_are_never_printed(tmp_path, capsys):
    assert main(["m", "--api-key", "secret", "--print-config"]) == 0
    told = capsys.readouterr().out
    assert "secret" not in told and json.loads(told)["api_keys"] == 1


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["ftp://x"], "ftp://x"),
        (["http://x/v1"], "http://x/v1"),
        (["http://x", "--imbalance", "-1"], "imbalance"),
        (["http://x", "--host", "0.0.0.0"], "loopback"),
        (["http://x", "--health-timeout", "0"], "health-timeout"),
    ],
)
def test_the_routers_flags_are_bounded(capsys, flags, word):
    with pytest.raises(SystemExit) as ended:
        main(["route", *flags])
    assert ended.value.code == 2 and word in capsys.readouterr().err
    assert main(["route", "http://x:1", "--print-config"]) == 0


def test_the_page_of_the_server_has_every_status():
    """What the sources raise, and the table of errors."""
    page = (ROOT / "docs/serving.md").read_text()
    table = page[page.index("| status | when |") :].split("\n\n")[0]
    told = {int(status) for row in table.splitlines()[2:] for status in re.findall(r"\d+", row.split("|")[1])}
    texts = [path.read_text() for path in (ROOT / "kvclient/serve").rglob("*.py")]
    raised = {
        int(status) for text in texts for status in re.findall(r"(?:ApiError|Failed)\((?:\s*)(\d{3})", text)
    }
    assert raised <= told, raised - told
    assert told == raised
