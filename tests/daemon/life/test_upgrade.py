"""The upgrade demo: another build takes over under load, and no client sees an error, a wrong byte or
a lost block.

Method: examples/upgrade_demo.py as a user runs it; what it prints is judged, not how long anything took.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_another_build_takes_over_under_load():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/upgrade_demo.py"), "--clients", "2", "--upgrades", "1"],
        cwd="/", capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    said = done.stdout
    assert re.search(r"^1\.0\.0 -> 1\.0\.1: no daemon for \d+ ms, blocks kept$", said, re.MULTILINE), said
    assert done.returncode == 0 and "all as expected" in said
    clients = re.findall(
        r"^client \d: (\d+) reads.*; (\d+) writes.*; (errors 0.*); \d+ writes without", said, re.MULTILINE
    )
    assert len(clients) == 2, said + done.stderr
    for reads, writes, harm in clients:
        assert int(reads) > 0 and int(writes) > 0 and harm == "errors 0, wrong bytes 0, lost blocks 0"


def test_what_was_not_as_expected_is_said():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/upgrade_demo.py"), "--clients", "1", "--upgrades", "1",
         "--limit-s", "0"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert re.search(r"NOT AS EXPECTED: there was no daemon for [\d.]+ s; the limit is 0 s", done.stdout)
