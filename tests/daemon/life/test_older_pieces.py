"""Client and daemon of different versions, where blocks lie in pieces: this tree and the last commit that
spoke session protocol 4.

Method: as test_older.py. What one of the two cannot read is a miss or a copy, at once, never a wrong byte.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvclient
from kvclient import Layout
from kvclient.client.region import Region
from tests.daemon.life.test_older import built

PROTOCOL_4 = "4af9d12f6c"
PAGE, LAYERS = 4096, 2
LAYOUT = Layout(LAYERS, 2, 64, "float16", 16)  # K and V of a layer: a page each
OLD_READER = """
import sys
import kvclient
client = kvclient.connect(dir=sys.argv[1], on_error="raise")
print("attached", flush=True)
for line in sys.stdin:
    key, wait_s = line.split()
    with client.get([bytes.fromhex(key)], wait_s=float(wait_s)) as blocks:
        print("miss" if blocks[0] is None else blocks[0].layer(1).tobytes().hex(), flush=True)
"""


@pytest.fixture(scope="session")
def older() -> Path:
    return built(PROTOCOL_4)


def place() -> np.ndarray:
    at = PAGE * np.array([7, 2, 5, 11]).reshape(1, LAYERS, 2, 1)
    return np.stack([at, np.full_like(at, PAGE)], -1)


def filled(client: kvclient.KVClient) -> tuple[Region, bytes]:
    """A region, and what layer 1 of a block there is."""
    region = client.register_region(16 * PAGE)
    region.array[:] = np.random.default_rng(5).integers(0, 256, region.length, np.uint8)
    return region, region.array[5 * PAGE : 6 * PAGE].tobytes() + region.array[11 * PAGE : 12 * PAGE].tobytes()


@pytest.mark.slow
def test_an_old_client_misses_them_at_once(daemon, older):
    kvstored = daemon(memory="64MiB")
    client = kvstored.connect()
    layout = client.register_layout(LAYOUT)
    region, layer = filled(client)
    apart, whole = os.urandom(32), os.urandom(32)
    old = subprocess.Popen(
        [sys.executable, "-c", OLD_READER, str(kvstored.dir)], cwd=older, text=True,
        env={**os.environ, "PYTHONPATH": str(older)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert old.stdout.readline() == "attached\n"
        assert region.register([apart], layout, place(), in_place=True)[0].in_place
        assert not region.register([whole], layout, place() + np.array([64, 0]), in_place=True)[0].in_place
        answers = []
        for key, wait_s in ((apart, 0), (apart, 3600), (whole, 0)):
            old.stdin.write(f"{key.hex()} {wait_s}\n")
            old.stdin.flush()
            answers.append(old.stdout.readline().strip())
        assert answers[:2] == ["miss", "miss"]
        assert len(bytes.fromhex(answers[2])) == 2 * PAGE
        with client.get([apart]) as blocks:
            assert blocks[0].layer(1).tobytes() == layer
    finally:
        old.stdin.close()
        old.wait(60)
        old.stdout.close()


@pytest.mark.slow
def test_an_old_daemon_is_given_copies_and_takes_over_no_table_with_pieces(daemon, older):
    kvstored = daemon(memory="64MiB")
    ours = kvstored.command
    kvstored.stop()
    kvstored.args.append("--fresh")
    kvstored.command = ["env", "-C", str(older), f"PYTHONPATH={older}", sys.executable]
    kvstored.start()
    kvstored.args.remove("--fresh")
    key = os.urandom(32)
    with kvstored.connect() as client:
        layout = client.register_layout(LAYOUT)
        region, layer = filled(client)
        (answer,) = region.register([key], layout, place(), in_place=True)
        assert (answer.word, answer.in_place) == ("sealed", False)
        kvstored.command = ours
        kvstored.restart()  # up: the pool is adopted
        with client.get([key]) as blocks:
            assert blocks[0].layer(1).tobytes() == layer
        region.close()
        region, layer = filled(client)
        assert region.register([os.urandom(32)], layout, place(), in_place=True)[0].in_place
        kvstored.command = ["env", "-C", str(older), f"PYTHONPATH={older}", sys.executable]
        kvstored.restart(kill=True)  # down: a new one
        assert list(client.lookup([key]).states) == [0]
        (answer,) = region.register([key], client.register_layout(LAYOUT), place(), in_place=True)
        assert (answer.word, answer.in_place) == ("sealed", False)
    assert kvstored.log().count("adopted=True") == 1
