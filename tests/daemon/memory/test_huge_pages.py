"""A pool in small pages becomes one of huge pages under its clients, and the daemon tells how much of it is.

Method: a real daemon that begins at once (`huge_after_s`), blocks that are read again while it does so. The
page by page proof is native/tests/huge_pages_test.cc.
"""

import json
import os

import numpy as np
import pytest

import kvclient
from kvstored.cli.main import main
from tests.fault.children import eventually

POOL_MIB, BLOCKS = 64, 40  # of a MiB


LINUX = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


@pytest.mark.skipif(LINUX < (6, 6), reason=f"Linux {LINUX} makes no huge pages of shared memory on request")
def test_a_pool_in_small_pages_becomes_huge_under_its_clients(daemon, capsys):
    kvstored = daemon(f"{POOL_MIB}MiB", ("--huge-after-s", "1"))

    def counters() -> dict[str, int]:
        assert main(["status", "--json", "--dir", str(kvstored.dir)]) == 0
        (space,) = json.loads(capsys.readouterr().out)["namespaces"]
        return space["counters"]

    with kvclient.connect(dir=str(kvstored.dir)) as client:
        layout = client.register_layout(
            kvclient.Layout(1, 1, 2048, "uint8", 256, meta_fixed=0, meta_per_token=0)
        )
        keys = [bytes([n]) * 32 for n in range(BLOCKS)]
        with client.create(keys, layout) as writer:
            for n in range(BLOCKS):
                writer[n].layer(0)[:] = n
        wrong = []

        def made() -> bool:
            with client.get(keys, verify=True) as blocks:
                wrong.extend(n for n in range(BLOCKS) if not np.all(blocks[n].layer(0) == n))
            return counters()["huge_bytes"] == POOL_MIB << 20

        eventually(made, "all of the pool is made of huge pages", 120)
        assert not wrong
    assert main(["status", "--dir", str(kvstored.dir)]) == 0
    assert "64 MiB of it huge pages, in /dev/shm" in capsys.readouterr().out
