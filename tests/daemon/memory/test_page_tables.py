"""A client's memory is what it used lately: not the pool, and not twice because it may write.

Method: processes of their own attach to a pool whose memory all exists, read or write a part of it, and look
at what the kernel counts as theirs (/proc/self/smaps, the pool's mappings).
"""

import json
import subprocess
import sys

import pytest

from kvstored.cli.main import main
from tests.conftest import ROOT
from tests.fault.children import eventually

MIB = 1 << 20
POOL_MIB, BLOCKS = 256, 24  # of a MiB
CLIENT = """
import json, os, re, select, sys, time
import kvclient
from kvclient import Layout

def mine():
    rss, ours = 0, False
    for line in open("/proc/self/smaps"):
        if re.match(r"[0-9a-f]+-", line):
            ours = line.rstrip().endswith(".pool") or "pool" in line.rsplit("/", 1)[-1]
        elif ours and line.startswith("Rss:"):
            rss += int(line.split()[1]) << 10
    return rss

def shared():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem:"))

what = sys.argv[2]
with kvclient.connect(dir=sys.argv[1], read_only=what == "read") as client:
    found = {"attached": mine()}
    keys = [bytes([n]) * 32 for n in range(int(sys.argv[3]))]
    if what == "read":
        with client.get(keys) as blocks:
            assert all(set(block.layer(0).ravel().tolist()) == {n} for n, block in enumerate(blocks))
    else:
        layout = client.register_layout(Layout(1, 1, 2048, "uint8", 256, meta_fixed=0, meta_per_token=0))
        for n, key in enumerate(keys):
            with client.create([key], layout) as writer:
                assert writer.results == ["granted"]
                writer[0].layer(0)[:] = n
    found["used"] = mine()
    found["told"] = client.populated_bytes
    if sys.argv[4:] == ["idle"]:
        found["before"], deadline = shared(), time.monotonic() + 120
        while mine() and time.monotonic() < deadline:
            select.select([], [], [], 0.2)
        found["idle"], found["after"] = mine(), shared()
        with client.get(keys) as blocks:
            layers = [set(block.layer(0).ravel().tolist()) for block in blocks]
        found["right"] = layers == [{n} for n in range(len(keys))]
print(json.dumps(found))
"""


@pytest.fixture
def run(daemon, capsys):
    kvstored = daemon(f"{POOL_MIB}MiB", ("--huge-after-s", "0"))

    def faulted() -> bool:
        assert main(["status", "--json", "--dir", str(kvstored.dir)]) == 0
        (space,) = json.loads(capsys.readouterr().out)["namespaces"]
        return space["counters"]["faulted_bytes"] == POOL_MIB * MIB

    eventually(faulted, "all of the pool's memory exists", 60)

    def client(what: str, blocks: int, *then: str) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(kvstored.dir), what, str(blocks), *then],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return client


def test_a_client_has_what_it_used_in_its_page_tables(run):
    for what, most in (("write", 2 * BLOCKS + 4), ("read", 2 * BLOCKS + 4), ("write", 4)):
        found = run(what, BLOCKS if most > 4 else 0)
        assert found["attached"] <= MIB, "attaching maps nothing"
        assert found["used"] <= most * MIB, f"{what}: what was used, and no more than that once more ahead"
        if most > 4:
            assert found["used"] >= BLOCKS * MIB, "it was touched"


@pytest.mark.slow  # what was not used for ten to twenty seconds; page_tables_test.cc has less time
def test_what_a_client_does_not_use_goes_from_its_page_tables(run):
    for what in ("write", "read"):
        found = run(what, BLOCKS, "idle")
        assert found["before"] >= BLOCKS * MIB
        assert found["idle"] == 0
        assert found["after"] <= found["before"] - BLOCKS * MIB, "RssShmem"
        assert found["right"]
