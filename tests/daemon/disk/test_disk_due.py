"""Goal: nothing that is due for the disk gets lost without a word. Method: more than the memory holds, sealed
as fast as can be, all of it to be written at once; each block is on disk or counted.
"""

from kvclient.testing.conformance.case import BIG, SMALL, new_keys

BLOCKS, AT_ONCE = 256, 8
LOST = ("evictions_unwritten", "writes_dropped")


def test_of_a_burst_every_block_is_on_disk_or_counted(daemon, tmp_path, wait_until):
    args = ("--disk", str(tmp_path / "blocks"), "--disk-quota", "1GiB", "--disk-write-priority", "50")
    client = daemon(memory="16MiB", args=args).connect()
    layout_id = client.register_layout(BIG.to_blob())
    for _ in range(BLOCKS // AT_ONCE):
        with client.create(new_keys(AT_ONCE), layout_id, priority=80) as writer:
            assert writer.results == ["granted"] * AT_ONCE
            writer.seal(zero_rest=True)
    wait_until(lambda: client.stats()["pending_writes"] == 0, "nothing waits to be written")
    wait_until(
        lambda: (now := client.stats())["disk_written"] + sum(now[name] for name in LOST) == BLOCKS,
        "what is not on disk is counted",
    )
    assert client.stats()["evictions_unwritten"] <= client.stats()["evictions"]


def test_a_burst_that_fits_memory_is_written_whole(daemon, tmp_path, wait_until):
    """It was 1,024 blocks however much memory there was; the others were lost beside a pool half empty."""
    args = ("--disk", str(tmp_path / "blocks"), "--disk-quota", "1GiB", "--max-blocks", "4096")
    client = daemon(memory="256MiB", args=args).connect()
    layout_id = client.register_layout(SMALL.to_blob())
    blocks = 1500
    for start in range(0, blocks, 250):
        with client.create(new_keys(250), layout_id, priority=90) as writer:
            assert writer.results == ["granted"] * 250, start
            writer.seal(zero_rest=True)
    wait_until(lambda: client.stats()["pending_writes"] == 0, "nothing waits to be written", 120)
    wait_until(lambda: client.stats()["disk_written"] == blocks, "all of it is written", 120)
    assert client.stats()["writes_dropped"] == 0
