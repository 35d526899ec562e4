"""The upgrade demo: another build takes over under load, and no client sees an error, a wrong byte or
a lost block.

Method: examples/upgrade_demo.py as a user runs it; what it prints is judged, not how long anything took.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_another_build_takes_over_under_load():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/upgrade_demo.py"), "--clients", "2", "--upgrades", "1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = done.stdout
    assert re.search(r"^1\.0\.0 -> 1\.0\.1: no daemon for \d+ ms, blocks kept$", said, re.MULTILINE), said
    clients = re.findall(
        r"^client \d: (\d+) reads.*; (\d+) writes.*; (errors 0.*); \d+ calls", said, re.MULTILINE
    )
    assert len(clients) == 2, said + done.stderr
    for reads, writes, harm in clients:
        assert int(reads) > 0 and int(writes) > 0 and harm == "errors 0, wrong bytes 0, lost blocks 0"
