"""Proves where settings come from: a file, below the environment, below flags; each wrong one is named.

Method: the command lines of the server and the router, with files and environments of every kind.
"""

import json

import pytest

from kvclient.serve.__main__ import main, options


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
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, capsys, text, word):
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        options(["m", "--config", str(file)])
    assert ended.value.code == 2 and word in capsys.readouterr().err


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
