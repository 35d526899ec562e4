"""The command line without a daemon: arguments, help, exit codes, print-config, completion.

Method: main() in this process, or `python -m kvstored` where the environment or the interpreter's flags
matter.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.cli import answers, render
from kvstored.cli.completion import script
from kvstored.cli.main import main, parser
from kvstored.config import sources
from kvstored.errors import Exit

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    "serve", "ping", "status", "ls", "describe", "rm", "flush", "revoke", "drain", "scrub", "top", "layouts",
    "peers", "push", "config", "reload", "stop", "pools", "fsck", "completion",
)  # fmt: skip


def run(*arguments, flags=(), **environ):
    return subprocess.run(
        [sys.executable, *flags, "-m", "kvstored", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "examples:" in text and f"kvstored {command}" in text.split("examples:")[1]


def test_the_main_help_names_all_commands_and_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert tuple(re.findall(r"^    ([a-z]+)\s", text, re.MULTILINE)) == COMMANDS
    for code in Exit:
        assert re.search(rf"\b{code.value} [a-z]", text.split("exit codes:")[1]), code


def test_unknown_variables_are_refused_if_mistyped_and_else_named(tmp_path):
    asked = ("serve", "--dir", str(tmp_path / "k"), "--print-config", "--json")
    wrong = run(*asked, KVSTORED_MAX_PIN="64")
    assert wrong.returncode == Exit.USAGE and not wrong.stdout
    assert "KVSTORED_MAX_PIN " in wrong.stderr and "KVSTORED_MAX_PINS" in wrong.stderr
    foreign = run(*asked, KVSTORED_SERVICE_HOST="10.0.0.1")
    assert foreign.returncode == Exit.DONE and json.loads(foreign.stdout)
    assert "warning environment_unread name=KVSTORED_SERVICE_HOST" in foreign.stderr


def test_help_of_serve_states_bounds_and_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--memory BYTES" in text and "8MiB to 16TiB; default 1GiB" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["rm"],
        ["rm", "abc"],
        ["rm", "zz" * 32],
        ["ls", "--prefix", "abc"],
        ["ls", "--limit", "0"],
        ["status", "--timeout-s", "0"],
        ["drain", "--wait-s", "301"],
        ["top", "--interval-s", "x"],
        ["completion", "fish"],
        ["fsck"],
    ],
)
def test_wrong_arguments_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == Exit.USAGE


@pytest.mark.parametrize(
    ("arguments", "nearest", "usage"),
    [
        (["serve", "--memroy", "4GiB"], "the nearest is --memory", "usage: kvstored serve [--FIELD V"),
        (["ls", "--namespce=x"], "the nearest is --namespace", "usage: kvstored ls "),
        (["ls", "--zzz"], "kvstored ls --help lists them", "usage: kvstored ls "),
        (["statsu"], "the nearest is status", "usage: kvstored [-h]"),
        (["gc"], "the nearest is pools", "usage: kvstored [-h]"),
        (["stop", "now"], "one argument too many: 'now'", "usage: kvstored stop "),
        (["completion", "bsh"], "the nearest is bash", "usage: kvstored completion "),
        (["stop", "--disc"], "the nearest is --discard", "usage: kvstored stop "),
    ],
)
def test_what_is_mistyped_is_told_with_the_nearest_and_the_usage_that_was_meant(
    arguments, nearest, usage, capsys
):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == Exit.USAGE
    assert nearest in error and usage in error and len(error.splitlines()) <= 5
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    said = json.loads(capsys.readouterr().err)["error"]
    assert nearest in said["text"] and said["kind"] == "usage"


def test_an_unknown_field_of_the_file_is_told_with_the_nearest(tmp_path, capsys):
    file = tmp_path / "k.toml"
    for text, nearest in (
        ("memroy = 1", "the nearest is 'memory'"),
        ("[namespaces.a]\nreaderz = []", "the nearest is 'readers'"),
        ("qqqqqqqq = 1", "kvstored serve --help lists them"),
    ):
        file.write_text(text)
        assert main(["serve", "--dir", "/tmp/x", "--config", str(file), "--print-config"]) == Exit.USAGE
        error = capsys.readouterr().err
        assert nearest in error and len(error) < 250


def test_without_a_directory_a_user_is_told_what_to_give(monkeypatch):
    from kvstored.errors import ConfigError

    monkeypatch.setattr(sources.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"XDG_RUNTIME_DIR.* is not set: give --dir.*KVSTORED_DIR"):
        sources.default_dir({})


def test_wrong_configuration_ends_with_2_and_one_line(capsys):
    assert main(["serve", "--dir", "/tmp/x", "--memory", "1MiB"]) == Exit.USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "memory" in error and "8MiB" in error


WITHOUT_A_DAEMON = ("serve", "fsck", "pools", "completion")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in WITHOUT_A_DAEMON])
def test_without_a_daemon_every_command_ends_with_3(command, tmp_path, capsys):
    needed = {"flush": ["--yes"], "rm": ["00" * 32], "describe": ["00" * 32], "revoke": ["1"]}
    needed["push"] = ["--to", "b", "00" * 32]
    extra = needed.get(command, [])
    assert main([command, "--dir", str(tmp_path), *extra]) == Exit.UNREACHABLE
    captured = capsys.readouterr()
    assert captured.out == "" and f"`kvstored serve --dir {tmp_path}`" in captured.err
    assert main([command, "--dir", str(tmp_path), *extra, "--json"]) == Exit.UNREACHABLE
    captured = capsys.readouterr()
    said = json.loads(captured.err)["error"]
    assert captured.out == "" and said["exit"] == 3 and str(tmp_path) in said["text"]


def test_a_dead_daemons_socket_is_no_daemon(tmp_path, capsys):
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "grpc.sock"))
    (tmp_path / "daemon.lock").touch()
    (tmp_path / "pid").write_text(
        f"{os.getpid()}\n"
    )  # a recycled pid: the lock, not this file, says who runs
    assert main(["status", "--dir", str(tmp_path)]) == Exit.UNREACHABLE
    assert main(["stop", "--dir", str(tmp_path)]) == Exit.UNREACHABLE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes another user's files")
def test_another_users_socket_is_no_daemon_to_ask_though_it_is_open(tmp_path, monkeypatch, capsys):
    (tmp_path / "grpc.sock").touch(0o666)
    (tmp_path / "grpc.sock").chmod(0o666)
    os.chown(tmp_path / "grpc.sock", 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["status", "--dir", str(tmp_path)]) == Exit.REFUSED
    assert "is user 12345's: only that user and root may ask it" in capsys.readouterr().err


def test_a_command_asks_the_daemon_that_a_client_would_find(tmp_path, monkeypatch, capsys):
    """A user's own directory, where nobody runs, is not asked while the host has a daemon."""
    system, user = tmp_path / "system", tmp_path / "user/kvstored"
    for directory in (system, user):
        directory.mkdir(parents=True)
    monkeypatch.setattr(sources, "SYSTEM_DIR", str(system))
    monkeypatch.setattr("os.access", lambda *_, **__: False)  # it is another user's
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user.parent))
    monkeypatch.delenv("KVSTORED_DIR", raising=False)
    assert main(["ping"]) == Exit.UNREACHABLE and f"no daemon in {user}" in capsys.readouterr().err
    for socket in ("kvstored.sock", "grpc.sock"):
        (system / socket).touch()
    assert main(["ping"]) == Exit.REFUSED
    assert f"the daemon in {system} is user {os.geteuid()}'s" in capsys.readouterr().err
    monkeypatch.setenv("KVSTORED_DIR", str(user))
    assert main(["ping"]) == Exit.UNREACHABLE and f"no daemon in {user}" in capsys.readouterr().err


def test_print_config_shows_values_and_sources(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("max_sessions = 10\nmax_pins = 100\n")
    done = run(
        "serve", "--dir", "/tmp/x", "--config", str(file), "--print-config", "--json", KVSTORED_MAX_PINS="200"
    )
    assert done.returncode == 0, done.stderr
    entries = {entry["name"]: (entry["value"], entry["source"]) for entry in json.loads(done.stdout)}
    assert entries["dir"] == ("/tmp/x", "flag")
    assert entries["max_pins"] == ("200", "environment")
    assert entries["max_sessions"] == ("10", "file")
    assert entries["memory"] == ("1GiB", "default")
    human = run("serve", "--dir", "/tmp/x", "--print-config")
    assert re.search(r"^memory +1GiB +default$", human.stdout, re.MULTILINE)


def test_print_config_can_be_fed_back(tmp_path):
    """Every printed value is one that the same field accepts."""
    first = run(
        "serve",
        "--dir",
        "/tmp/x",
        "--print-config",
        "--json",
        KVSTORED_NAMESPACES="a=0.5:writers=alice+@7,b=0.25:disk_quota=8MiB",
        KVSTORED_DISK="/tmp/d,/tmp/e",
        KVSTORED_DISK_QUOTA="1GiB",
    )
    entries = [entry for entry in json.loads(first.stdout) if entry["value"]]
    file = tmp_path / "kvstored.toml"
    tables = [entry for entry in entries if entry["name"].startswith("namespaces.")]
    file.write_text("".join(f"{entry['name']} = {entry['value']}\n" for entry in tables))
    assert len(tables) == 2
    options = [entry for entry in entries if entry not in tables]
    flags = [f"--{entry['name'].replace('_', '-')}={entry['value']}" for entry in options]
    second = run("serve", f"--config={file}", *flags, "--print-config", "--json")
    assert {entry["name"]: entry["value"] for entry in json.loads(second.stdout)} == {
        entry["name"]: entry["value"] for entry in json.loads(first.stdout)
    }


def test_the_daemon_refuses_to_run_without_assertions(tmp_path):
    done = run("serve", "--dir", str(tmp_path / "d"), flags=("-O",))
    assert done.returncode == Exit.CANNOT_START and "python -O" in done.stderr
    assert not (tmp_path / "d").exists()


def test_help_and_completion_do_not_import_grpc():
    """They must be quick: a shell calls them while somebody types."""
    code = (
        "import sys; from kvstored.cli.main import main; main(['completion', 'bash']); "
        "sys.exit('grpc' in sys.modules or 'asyncio' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60).returncode
        == 0
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_parse_and_offer_everything(shell):
    text = script(parser(), shell)
    for command in COMMANDS:
        assert command in text
    assert "--max-pins" in text and "--interval-s" in text
    if shutil.which(shell):
        assert (
            subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, timeout=60).returncode
            == 0
        )


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("kvstored st", "status stop"),
        ("kvstored serve --metrics-p", "--metrics-port"),
        ("kvstored completion z", "zsh"),
        ("kvstored serve --pool m", "memfd"),
        ("kvstored serve --log-level w", "warning"),
        ("kvstored serve --disk kvst", "kvstored"),
        ("kvstored serve --metrics-token-file LICEN", "LICENSE"),
        ("kvstored ls --dir kvst", "kvstored"),
        ("kvstored fsck kvst", "kvstored"),
        ("kvstored fsck --rep", "--repair"),
        ("kvstored rm kvst", ""),
    ],
)
def test_bash_completes(words, wanted):
    typed = words.split(" ")
    program = (
        script(parser(), "bash")
        + f"\nCOMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _kvstored; echo ${{COMPREPLY[@]}}"
    )
    assert (
        subprocess.run(
            ["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stdout.strip()
        == wanted
    )


def test_tables_align():
    text = render.table(("name", "n"), [("a", "1"), ("long", "100")], right=frozenset((1,)))
    assert text.split("\n") == ["name    n", "a       1", "long  100"]


def test_status_shows_a_fenced_namespace_and_draining():
    status = {
        "version": "1",
        "pid": 1,
        "uptime_ms": 0,
        "rss_bytes": 0,
        "draining": True,
        "leases": 0,
        "degraded": [{"state": "draining", "namespace": "", "text": "on request", "since_ms": 1}],
        "namespaces": [
            {
                "namespace": "a",
                "adopted": False,
                "place": "/run/kvstored-pool",
                "huge_pages": True,
                "problem": "fenced: the pool was truncated",
                "memory_quota_bytes": 1 << 30,
                "disk_quota_bytes": 5 << 30,
                "readers": ["@analysts"],
                "writers": ["alice", "1000"],
                "salted": True,
                "counters": {},
            }
        ],
    }
    text = render.status_text(status)
    assert "DEGRADED  draining: on request" in text
    assert "quota     1 GiB of memory, 5 GiB on disk" in text
    assert "open to   reading: @analysts; writing: alice, 1000; salted" in text
    assert "DRAINING" in text and "PROBLEM   fenced: the pool was truncated" in text


def test_top_paints_only_what_is_printable():
    text = "namespace a\nDEGRADED  x: y\n  memory    [" + "#" * 40 + "] 100 %\n  hits      [" + "." * 40 + "]"
    shown = render.painted(text)
    assert "\x1b[31mDEGRADED  x: y\x1b[0m" in shown and "\x1b[33m[####" in shown and "\x1b[32m[...." in shown
    assert re.sub(r"\x1b\[\d+m", "", shown) == text


def test_progress_never_leaves_its_bar():
    for done, whole in ((0, 0), (0, 10), (5, 10), (10, 10), (20, 10)):
        assert len(render.progress_line(done, whole).split("]")[0]) == 31


@pytest.mark.parametrize(
    "arguments", [("completion", "bash"), ("serve", "--print-config"), ("fsck", "tests/golden")]
)
def test_output_that_cannot_be_written_is_one_line_and_no_answer(arguments, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstored", *arguments],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == Exit.USAGE, done.stderr
    assert "No space left" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("status", "--dir"), ("stop", "--dir"), ("fsck",), ("serve", "--dir"), ("ls", "--namespace")],
)
def test_an_argument_that_is_no_utf8_is_refused(arguments, capsys):
    assert main([*arguments, "/tmp/\udcff"]) == Exit.USAGE
    assert "is no UTF-8" in capsys.readouterr().err


def test_what_a_daemon_says_commands_no_terminal(capsys):
    """It may be another user's: root looks into a directory that is named to it."""
    text = "two\nlines é \x1b[2J\x9b\r\t\u202e"
    shown = "two\nlines é \\x1b[2J\\x9b\\r\\t\\u202e\n"
    answers.show(parser().parse_args(["status"]), {}, text)
    assert capsys.readouterr().out == shown
    assert answers.complain(text, Exit.REFUSED) == Exit.REFUSED
    assert capsys.readouterr().err == f"kvstored: {shown}"
