"""The processes of `pytest -n`, forked behind their imports (`-p tests.workers`, by `make test`).

Each would import torch, transformers and the public clients by itself, and once more for the server that
forks its tests' processes (tests/warm_python.py): eight times seconds of processor. Here it is done once.
Owns how execnet starts a process on this machine, from when xdist sets up its processes until the run has
ended, also of one in the place of one that died; never what such a process does.
"""

import importlib.util
import subprocess
import sys

import execnet.gateway_io as gateway
import pytest
from execnet.gateway_base import Popen2IO

from tests.warm_python import IMPORTED_BY_MODELS, WarmWorker

# What files of tests import besides; of those that are not installed their tests say so.
IMPORTED_BY_TESTS = ("pytest", "execnet", "hypothesis.stateful", "openai", "anthropic")


class Forked(gateway.Popen2IOMaster):
    """What execnet talks to: `python -u -c PROGRAM`, forked."""

    def __init__(self, args: list[str], execmodel: object):
        self.popen = process = WarmWorker(
            [sys.executable, "-c", args[-1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        Popen2IO.__init__(self, process.stdin, process.stdout, execmodel=execmodel)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    there = [name for name in IMPORTED_BY_TESTS if importlib.util.find_spec(name.partition(".")[0])]
    WarmWorker.imported = (*IMPORTED_BY_MODELS, *there)
    gateway.Popen2IOMaster = Forked
