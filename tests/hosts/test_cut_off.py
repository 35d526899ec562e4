"""A host that is cut off, every packet dropped and nobody told: who waits for a block from there is answered,
and what it has is found again when it is back.

Network namespaces and nft. Skipped, with the reason, where there are none.
"""

import sys
import threading
from pathlib import Path

import pytest

import kvclient
from kvclient.errors import BlockLost
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import hosts_here

WAIT_S = 300.0  # of a get: far beyond what a host that is silent is given
ANSWER_S = 60.0


@pytest.fixture
def hosts(wait_until):
    with hosts_here.running("a", "b", memory="64MiB", tls=False) as made:
        try:
            made["a"].network.cut_off("a")
            made["a"].network.join_again("a")
        except RuntimeError as why:
            pytest.skip(str(why))
        wait_until(lambda: made["b"].peers()["a"]["state"] == "up")
        yield made


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
