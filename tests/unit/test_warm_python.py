"""Goal: a process that is forked behind the imports is a child like any other: its output, end and death.

Method: small programs, each once by Python and once forked, which say the same; a kill; what it inherits.
"""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.warm_python import ROOT, WarmDaemon, WarmWorker, run

PROGRAMS = {
    "words, environment, directory": (
        "import os, sys; print(sys.argv, os.environ['A'], os.getcwd(), __name__, sys.path[0])"
    ),
    "standard input": "import sys; print(sys.stdin.read().upper(), file=sys.stderr)",
    "a status": "raise SystemExit(7)",
    "a message for a status": "raise SystemExit('no')",
    "at the end": "import atexit; atexit.register(print, 'over')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "an interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "descriptors": "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_is_as_if_python_had_started(program, tmp_path):
    said = []
    for python in (subprocess.Popen, WarmDaemon):
        process = python(
            [sys.executable, "-c", program, "b", "c"], cwd=tmp_path, env={**os.environ, "A": "d"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        output, errors = process.communicate("in", timeout=60)
        said.append((process.returncode, output, errors.splitlines()[-1:]))
    assert said[0] == said[1]


def test_it_is_a_child_that_can_be_killed_and_has_imported():
    program = "import sys; print('kvstored.server' in sys.modules, flush=True); sys.stdin.read()"
    process = WarmDaemon(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n" and process.poll() is None
    with open(f"/proc/{process.pid}/stat") as stat:
        assert int(stat.read().rsplit(")", 1)[1].split()[1]) == os.getpid()
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()


def test_of_many_that_start_at_once_each_is_a_child_and_the_one_that_was_asked_for():
    def start(number):
        program = f"import sys; print({number}, flush=True); sys.stdin.read()"
        return WarmDaemon(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    with ThreadPoolExecutor(8) as threads:
        processes = list(threads.map(start, range(64)))
    parents = set()
    for process in processes:
        with open(f"/proc/{process.pid}/stat") as stat:
            parents.add(int(stat.read().rsplit(")", 1)[1].split()[1]))
    said = []
    for number, process in enumerate(processes):
        line = process.stdout.readline()
        process.send_signal(signal.SIGUSR1 if number % 2 else signal.SIGUSR2)
        process.communicate(timeout=60)
        said.append((line, process.returncode))
    assert parents == {os.getpid()} and len({process.pid for process in processes}) == 64
    assert said == [(f"{n}\n", -(signal.SIGUSR1 if n % 2 else signal.SIGUSR2)) for n in range(64)]


def test_a_traceback_is_told():
    done = run([sys.executable, "-c", "1 / 0"], timeout=60, python=WarmDaemon)
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_worker_has_a_server_from_its_start(monkeypatch):
    """Forked beside it: one that was started for its first process would have imported torch."""
    monkeypatch.setattr(WarmWorker, "imported", ("kvstored.server",))
    program = """
import sys
from tests.warm_python import run
asked = "import sys; print('torch' in sys.modules, 'kvstored.server' in sys.modules)"
for _ in range(2):
    print(run([sys.executable, "-c", asked], timeout=60).stdout.split())
"""
    done = run([sys.executable, "-c", program], timeout=60, python=WarmWorker, cwd=ROOT)
    assert (done.stdout, done.returncode) == (2 * "['False', 'True']\n", 0), done.stderr
