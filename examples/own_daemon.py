"""A daemon for the time of an example: started in a directory of its own, ended with it, nothing left.

    with own_daemon.running(home, memory="512MiB"):
        client = kvclient.connect(dir=home)

Runs the `kvstored` that this Python has installed, from another directory than the clone's, whose source code
would otherwise stand before the installed package. If it does not start, its own words are the error.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def running(home: str | os.PathLike[str], memory: str = "512MiB") -> Iterator[subprocess.Popen[str]]:
    """Ready when it is entered. Raises SystemExit with what the daemon said if it ends before that."""
    serve = [sys.executable, "-m", "kvstored", "serve", "--dir", str(home), "--memory", memory, "--discard"]
    process = subprocess.Popen(serve, cwd=home, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:  # until it is ready, or has ended
            said.append(line)
            if " ready " in line:
                break
        else:
            raise SystemExit(f"the daemon did not start. It said:\n{''.join(said)}")
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
