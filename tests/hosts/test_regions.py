"""Goal: a block that is sealed where it lies in a client's own memory is another host's hit like any other;
what was given back is a miss there, and memory that is used again never spoils what was fetched before.

Method: two daemons that are peers, a region of the first, every byte compared.
"""

import os
import signal
import subprocess
import sys

import kvclient
from tests.conftest import ROOT, wait_for
from tests.daemon.memory.test_regions import held, key, noise, told
from tests.daemon.memory.test_regions_pieces import BLOB as PIECES
from tests.daemon.memory.test_regions_pieces import apart

LAYOUT = kvclient.Layout(3, 2, 64, dtype="float16", block_tokens=8)
BLOB = LAYOUT.geometry.to_blob()
SLOT = LAYOUT.geometry.length(8)


def fetched(client, name):
    """Its layers as bytes, brought from the other host; None: no word has come from there that it has it."""
    with client.get([name], wait_s=30, verify=True) as blocks:
        if blocks[0] is None:
            return None
    return held(client, name)


def soon_fetched(client, name):
    wait_for(lambda: fetched(client, name) is not None)
    return held(client, name)


def test_blocks_of_a_region_are_another_hosts_hits(pair_of_hosts):
    with pair_of_hosts[0].connect() as owner, pair_of_hosts[1].connect() as reader:
        layout = owner.register_layout(BLOB)
        reader.register_layout(BLOB)
        with owner.register_region(4 * SLOT) as region:
            region.array[:] = noise(7, region.length)
            place = region.buffers_at(layout, [0, 2 * SLOT])
            names = [key(9001), key(9002)]
            expected = [told(region, block) for block in place]
            assert all(a.in_place for a in region.register(names, layout, place, in_place=True))
            assert soon_fetched(reader, names[0]) == expected[0]
            wait_for(lambda: region.give_back(names[:1]) == ["taken"])  # the peer may still be read from
            assert region.give_back(names[1:]) == ["taken"]
            region.array[:] = noise(8, region.length)  # the allocator's again
            assert held(reader, names[0]) == expected[0]
            assert fetched(reader, names[1]) is None
            (answer,) = region.register([key(9003)], layout, place[:1], in_place=True)
            assert answer.in_place
            assert soon_fetched(reader, key(9003)) == told(region, place[0])


def test_blocks_in_pieces_are_too(pair_of_hosts):
    with pair_of_hosts[0].connect() as owner, pair_of_hosts[1].connect() as reader:
        layout = owner.register_layout(PIECES)
        reader.register_layout(PIECES)
        with owner.register_region(64 * 4096) as region:
            region.array[:] = noise(11, region.length)
            place = apart([5, 3, 20, 11, 40, 41])
            expected = told(region, place[0])
            assert region.register([key(9020)], layout, place, in_place=True)[0].in_place
            assert soon_fetched(reader, key(9020)) == expected
            wait_for(lambda: region.give_back([key(9020)]) == ["taken"])
            region.array[:] = noise(12, region.length)
            assert held(reader, key(9020)) == expected


OWNER = """
import sys, kvclient
from tests.daemon.memory.test_regions import key, noise
from tests.hosts.test_regions import BLOB, SLOT
client = kvclient.connect(sys.argv[1])
layout = client.register_layout(BLOB)
region = client.register_region(2 * SLOT)
region.array[:] = noise(9, region.length)
assert region.register([key(9010)], layout, region.buffers_at(layout, [SLOT]), in_place=True)[0].in_place
print("sealed", flush=True)
sys.stdin.read()
"""


def test_it_is_fetched_after_its_owner_was_killed(pair_of_hosts):
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(pair_of_hosts[0].dir)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "sealed\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    with pair_of_hosts[1].connect() as reader:
        layout = reader.register_layout(BLOB)
        with reader.register_region(2 * SLOT) as same:
            same.array[:] = noise(9, same.length)
            assert soon_fetched(reader, key(9010)) == told(same, same.buffers_at(layout, [SLOT])[0])


