"""Proves that torch's threads go to sleep behind a parallel loop once packed products have their own threads.

Method: the kernel counts how often a thread went to sleep by itself. Torch's second thread meets many
parallel loops with a little work of the first one between them: one that spins (for milliseconds) sleeps
between none. In a process of its own: libgomp counts threads for as long as a process lives.
"""

import os
import sys

import pytest
import torch

from kvclient.hf.awq import spinning
from tests.warm_python import run as run_warm

LOOPS = 200
CODE = f"""
import os, torch
from kvclient.hf import awq
from kvclient.hf.awq import spinning
torch.set_num_threads(2)
def threads():
    return set(os.listdir("/proc/self/task"))
def slept(thread):
    lines = open(f"/proc/self/task/{{thread}}/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary")).split()[1])
before = threads()
numbers = torch.zeros(1 << 18).exp()
numbers.zero_()
torchs = threads() - before
kind, rows = getattr(torch, "{{kind}}"), {{rows}}
layer = awq.AwqLinear(64, 128, 16, False, kind)
for _ in range(3):
    layer(torch.ones(rows, 64, dtype=kind))
theirs = sum(map(slept, torchs))
for _ in range({LOOPS}):
    numbers.exp()
    sum(range(10_000))
print(len(torchs), sum(map(slept, torchs)) - theirs, spinning.stand_for.cache_info().currsize)
assert torch.equal(numbers.exp(), torch.ones(1 << 18))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) > 2, reason="libgomp spins where it has cores to spare")
@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="torch has no OpenMP here")
@pytest.mark.parametrize("kind, rows", [("float32", 2), ("bfloat16", 200)])
def test_torchs_threads_sleep_behind_a_loop(kind, rows):
    """Of few rows, and of many, whose words become numbers for torch's product."""
    code = CODE.replace("{kind}", kind).replace("{rows}", str(rows))
    done = run_warm([sys.executable, "-c", code], timeout=300, check=True)
    theirs, slept, teams = map(int, done.stdout.split())
    assert theirs == 1 and slept > LOOPS // 2
    assert teams == 1


def test_one_thread_and_another_runtime_need_none(monkeypatch):
    assert spinning.stand_for.__wrapped__(1) == 0
    monkeypatch.setattr(spinning, "_libraries", lambda: ["/no/libgomp.so.1"])
    assert spinning.stand_for.__wrapped__(2) == 0
