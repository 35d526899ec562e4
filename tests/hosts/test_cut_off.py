"""A host that is cut off, every packet dropped and nobody told: who waits for a block from there is answered,
and what it has is found again when it is back. And one that is outside of the trusted network.

Network namespaces and nft. Skipped, with the reason, where there are none.
"""

import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvclient
from kvclient.errors import BlockLost
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys
from kvstored.cluster import frames
from tests.conftest import wait_for

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import hosts_here

WAIT_S = 300.0  # of a get: far beyond what a host that is silent is given
ANSWER_S = 60.0


@pytest.fixture(scope="module")
def hosts():
    with hosts_here.running("a", "b", memory="64MiB", tls=False) as made:
        try:
            made["a"].network.cut_off("a")
            made["a"].network.join_again("a")
        except RuntimeError as why:
            pytest.skip(str(why))
        wait_for(lambda: made["b"].peers()["a"]["state"] == "up", "b reaches a")
        yield made


KNOCK = """
import socket, sys
host, port, address, said = sys.argv[1:]
with socket.create_connection((host, int(port)), 60, (address, 0)) as stranger:
    try:
        stranger.sendall(bytes.fromhex(said))
        print(len(stranger.recv(1)))
    except ConnectionError:
        print(0)
"""


def test_who_is_outside_the_trusted_network_is_not_heard(hosts):
    """b speaks as a peer would, from its own address and from a second one."""
    network, (host, port) = hosts["a"].network, hosts["a"].at.split(":")
    for name, address in (("a", "192.168.77.1/24"), ("b", "192.168.77.2/24")):
        subprocess.run([*network.inside(name), "ip", "addr", "add", address, "dev", "eth0"], check=True)
    names = b"b".ljust(frames.NAME_BYTES, b"\0") + b"default".ljust(frames.NAME_BYTES, b"\0")
    hello = frames.frame(frames.HELLO, struct.pack("<II", frames.VERSION, 2) + names + bytes(32)).hex()
    answered = {}
    for address in (network.address("b"), "192.168.77.2"):
        asked = [*network.inside("b"), sys.executable, "-S", "-c", KNOCK, host, port, address, hello]
        answered[address] = int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    assert answered == {network.address("b"): 1, "192.168.77.2": 0}


def test_a_waiting_get_is_answered_and_the_host_is_found_again(hosts, wait_until):
    with kvclient.connect(dir=str(hosts["a"].dir)) as near, kvclient.connect(dir=str(hosts["b"].dir)) as far:
        layout = near.register_layout(SMALL.to_blob())
        far.register_layout(SMALL.to_blob())
        sealed, begun, found = new_keys(1), new_keys(1), []
        with near.create(sealed, layout) as writer:
            fill(writer[0], SMALL.num_layers)
        followed = threading.Event()

        def follow():
            with far.get(begun, follow=True, wait_s=WAIT_S) as blocks:
                followed.set()
                try:
                    found.append(blocks[0] and blocks[0].wait_layer(SMALL.num_layers - 1, timeout_s=WAIT_S))
                except BlockLost:
                    found.append(None)

        with near.create(begun, layout) as writer:
            writer[0].layer(0)[...] = 1
            writer[0].mark_layer(0)
            reader = threading.Thread(target=follow)
            reader.start()
            assert followed.wait(ANSWER_S)
            hosts["a"].network.cut_off("a")
            reader.join(ANSWER_S)
            assert found == [None], "a block that is lost, long before the get's own time is over"
            with far.get(sealed, wait_s=1.0) as blocks:
                assert blocks[0] is None
            hosts["a"].network.join_again("a")
            writer.abort()
        wait_until(lambda: hosts["b"].peers()["a"]["state"] == "up")

        def came():
            with far.get(sealed, wait_s=5.0) as blocks:
                if blocks[0] is not None:
                    check(blocks[0], SMALL.num_layers)
                return blocks[0] is not None

        wait_until(came)
