"""The disk tier through a real daemon and its client: written behind, loaded by layers, found after restarts.

Method: every block's bytes are a function of its key, so any block that is handed out can be checked. What
failures do to the tier is tests/fault's subject.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvclient.errors import BlockLost
from kvclient.testing.conformance.case import BIG, SMALL, check, fill, geometry, new_keys, pattern
from kvstored.v1 import admin_pb2, store_pb2
from tests.daemon.grpc_calls import Calls
from tests.fault.disks.devices import huge_memory

ON_DISK, RESIDENT = 3, 2


@pytest.fixture
def disk(tmp_path, daemon):
    """A factory of daemons with a disk tier in one directory of this test."""

    def make(*args: str, memory: str = "48MiB", quota: str = "1GiB", **more):
        disk_args = ("--disk", str(tmp_path / "blocks"), "--disk-quota", quota, "--disk-write-priority", "50")
        return daemon(memory=memory, args=(*disk_args, *args), **more)

    return make


def put(client, keys, geometry=SMALL, priority=60, **more):
    layout_id = client.register_layout(geometry.to_blob())
    for key in keys:
        with client.create([key], layout_id, priority=priority, **more) as writer:
            fill(writer[0], geometry.num_layers)


def written(client, wait_until, count):
    wait_until(lambda: client.stats()["pending_writes"] == 0, "nothing waits to be written")
    wait_until(lambda: client.stats()["disk_written"] >= count, f"{count} blocks were written")
    wait_until(lambda: client.stats()["disk_files"] >= count, "and are listed")


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "blocks").rglob("*.kv"))


def evict(client, keys, geometry=BIG):
    """Fills the pool with blocks of higher priority until none of the keys is in memory."""
    for _ in range(100):
        if RESIDENT not in client.lookup(keys).states:
            return
        put(client, new_keys(4), geometry, priority=90)
    raise AssertionError("the blocks stay in memory")


def test_a_client_is_told_what_its_disk_tier_holds_and_did(disk, wait_until, tmp_path):
    """The operator's figures of the same names."""
    started = disk(quota="64MiB")
    with started.connect() as client:
        keys = new_keys(3)
        put(client, keys, BIG)
        written(client, wait_until, 3)
        told = client.stats()
        assert told["disk_written"] == told["disk_files"] == len(files(tmp_path)) == 3
        assert told["disk_bytes"] == sum(path.stat().st_size for path in files(tmp_path))
        assert (told["disk_loaded"], told["disk_quota_bytes"]) == (0, 64 << 20)
        evict(client, keys)
        with client.get(keys[:2], wait_s=10) as blocks:
            assert blocks.hits == 2
        wait_until(lambda: client.stats()["disk_loaded"] == 2, "both loads are counted")
        names = "disk_files", "disk_bytes", "disk_quota_bytes", "disk_loaded", "disk_written"
        with Calls(started.dir) as calls:
            wait_until(
                lambda: [client.stats()[name] for name in names] == [calls.stats()[name] for name in names],
                "the operator is told the same, as soon as nothing is written",
            )


def test_blocks_come_back_from_disk_byte_for_byte(disk, wait_until, tmp_path):
    with disk().connect() as client:
        keys = new_keys(20)
        put(client, keys, BIG)
        names = {key.hex() for key in keys}
        wait_until(lambda: names <= {path.stem for path in files(tmp_path)}, "all are written")
        evict(client, keys)
        assert client.lookup(keys).on_disk == len(keys)
        assert client.get(keys).hits == 0  # a get that does not wait
        with client.get(keys[:8], wait_s=10) as blocks:
            for view in blocks:
                check(view, BIG.num_layers)
        with client.get(keys[8:16], wait_s=10, verify=True) as blocks:
            for view in blocks:
                check(view, BIG.num_layers)


def test_second_use_is_what_makes_a_block_worth_writing(disk, wait_until, tmp_path):
    with disk().connect() as client:
        once, twice = new_keys(5), new_keys(5)
        put(client, once, priority=10)
        put(client, twice, priority=10)
        with client.get(twice) as blocks:  # the hit ring tells the daemon within a second
            assert blocks.hits == 5
        wait_until(lambda: len(files(tmp_path)) == 5, "five files")
        assert {path.stem for path in files(tmp_path)} == {key.hex() for key in twice}


def test_a_cold_restart_finds_what_is_on_disk(disk, wait_until, tmp_path):
    server = disk("--fresh")
    keys = new_keys(50)
    with server.connect() as client:
        put(client, keys)
        wait_until(lambda: len(files(tmp_path)) == 50, "50 files")
    server.restart()
    with server.connect() as client:
        client.register_layout(SMALL.to_blob())
        wait_until(lambda: client.lookup(keys).on_disk == 50, "all are indexed")
        with client.get(keys, wait_s=10) as blocks:
            for view in blocks:
                check(view)


@pytest.mark.parametrize("kill", [False, True])
def test_a_warm_restart_has_memory_and_disk(disk, wait_until, tmp_path, kill):
    server = disk()
    with server.connect() as client:
        keys, hot = new_keys(20), new_keys(20)
        put(client, keys, BIG)
        wait_until(lambda: len(files(tmp_path)) >= 20, "20 files")
        evict(client, keys)
        put(client, hot, priority=99)
        assert client.lookup(hot).resident == 20
        server.restart(kill=kill)
        assert client.lookup(hot).resident == 20
        assert client.lookup(keys).states.count(ON_DISK) == 20
        with client.get(keys[:4], wait_s=10) as blocks, client.get(hot) as others:
            for view in blocks:
                check(view, BIG.num_layers)
            for view in others:
                check(view)


def test_a_reader_follows_a_load_by_layers(disk, wait_until, tmp_path):
    with disk().connect() as client:
        keys = new_keys(3)
        put(client, keys, BIG)
        wait_until(lambda: len(files(tmp_path)) >= 3, "three files")
        evict(client, keys)
        blocks = client.get(keys, follow=True, wait_s=10)
        for view in blocks:
            for layer in range(BIG.num_layers):
                view.wait_layer(layer)
            check(view, BIG.num_layers)
        blocks.release()


def test_many_who_ask_share_one_load(disk, wait_until, tmp_path):
    server = disk()
    with server.connect() as client:
        keys = new_keys(6)
        put(client, keys, BIG)
        wait_until(lambda: len(files(tmp_path)) >= 6, "six files")
        evict(client, keys)
        errors = []

        def ask():
            try:
                with server.connect() as mine, mine.get(keys, wait_s=10) as blocks:
                    for view in blocks:
                        check(view, BIG.num_layers)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        with Calls(server.dir) as calls:

            def loaded():
                return calls.admin.Stats(admin_pb2.StatsRequest()).namespaces[0].counters["disk_loaded"]

            wait_until(lambda: loaded() == 6, "all are counted, once")


def test_prefetch_is_a_hint_and_get_finds_the_blocks(disk, wait_until, tmp_path):
    with disk().connect() as client:
        keys = new_keys(6)
        put(client, keys, BIG)
        wait_until(lambda: len(files(tmp_path)) >= 6, "six files")
        evict(client, keys)
        assert client.prefetch([*keys, *new_keys(3)]) == 6
        wait_until(lambda: client.lookup(keys).resident == 6, "all are loaded")
        with client.get(keys) as blocks:
            for view in blocks:
                check(view, BIG.num_layers)


def test_what_nobody_has_is_a_miss_at_once(disk):
    with disk().connect() as client:
        began = time.monotonic()
        with client.get(new_keys(64), wait_s=60) as blocks:
            assert blocks.hits == 0
        assert time.monotonic() - began < 30  # nothing to wait for: not the whole time


def test_a_wait_ends_when_the_writer_seals_or_dies(disk):
    server = disk()
    with server.connect() as writer_client, server.connect() as client:
        layout_id = writer_client.register_layout(SMALL.to_blob())
        keys = new_keys(2)
        sealed = writer_client.create([keys[0]], layout_id)
        given_up = writer_client.create([keys[1]], layout_id)
        fill(sealed[0])
        found = []
        thread = threading.Thread(target=lambda: found.append(client.get(keys, wait_s=20)))
        thread.start()
        sealed.seal()
        given_up.abort()
        thread.join()
        check(found[0][0])
        assert found[0][1] is None
        found[0].release()


def test_what_is_deleted_is_gone_from_disk(disk, wait_until, tmp_path):
    server = disk()
    with server.connect() as client:
        keys = new_keys(10)
        put(client, keys)
        wait_until(lambda: len(files(tmp_path)) == 10, "ten files")
        assert client.delete(keys[:5]) == 5
        wait_until(lambda: len(files(tmp_path)) == 5, "their files are gone")
        server.restart(kill=True)
        assert client.lookup(keys[:5]).states == bytes(5)
        with client.get(keys[:5], wait_s=5) as blocks:
            assert blocks.hits == 0


def test_a_changed_byte_in_memory_is_a_miss_everywhere(disk, wait_until, tmp_path):
    server = disk()
    with server.connect() as client:
        keys = new_keys(2)
        layout_id = client.register_layout(SMALL.to_blob())
        with client.create(keys, layout_id, priority=60) as writer:
            kept = writer[0].layer(1)  # a writer that breaks the rule keeps its array
            for index in range(2):
                for layer in range(SMALL.num_layers):
                    shape = writer[index].layer(layer).shape
                    writer[index].copy_layer(layer, pattern(keys[index], layer, shape))  # leaves checksums
        wait_until(lambda: len(files(tmp_path)) == 2, "two files")
        with client.get(keys, verify=True) as blocks:
            assert blocks.hits == 2
        kept.view(np.uint16)[0, 0, 0, 0] ^= 1
        with client.get(keys, verify=True) as blocks:
            assert blocks[0] is None
            assert blocks[1] is not None
        assert client.stats()["corrupt"] == 1
        wait_until(lambda: len(files(tmp_path)) == 1, "its file is gone as well")
        assert client.lookup(keys).states == bytes([0, RESIDENT])


def test_two_directories_share_the_blocks(daemon, wait_until, tmp_path):
    places = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    server = daemon(
        memory="16MiB",
        args=("--disk", places, "--disk-quota", "64MiB", "--disk-write-priority", "0", "--fresh"),
    )
    keys = new_keys(40)
    with server.connect() as client:
        put(client, keys)

        def count(name):
            return len(list((tmp_path / name).rglob("*.kv")))

        wait_until(lambda: count("a") + count("b") == 40, "40 files")
        assert min(count("a"), count("b")) > 5
    server.restart()
    with server.connect() as client:
        client.register_layout(SMALL.to_blob())
        with client.get(keys, wait_s=10) as blocks:
            for view in blocks:
                check(view)


def test_a_directory_has_one_daemon(disk, daemon, tmp_path):
    disk()
    from tests.conftest import DaemonFailed

    with pytest.raises(DaemonFailed, match="another kvstored, or fsck, is at work there"):
        disk()


def test_the_quota_of_the_configuration_holds(disk, wait_until, tmp_path):
    with disk(quota="4MiB").connect() as client:
        put(client, new_keys(30), BIG)

        def used():
            return sum(path.stat().st_size for path in files(tmp_path))

        wait_until(lambda: client.stats()["pending_writes"] == 0, "nothing waits")
        wait_until(lambda: 0 < used() <= 4 << 20, "the files fit")


def test_a_lost_load_is_an_error_to_who_follows(disk, wait_until, tmp_path):
    with disk().connect() as client:
        keys = new_keys(1)
        put(client, keys, BIG)
        wait_until(lambda: len(files(tmp_path)) >= 1, "a file")
        evict(client, keys)
        path = next(path for path in files(tmp_path) if path.stem == keys[0].hex())
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2 + 4096)
            file.write(b"\xff" * 64)
        blocks = client.get(keys, follow=True, wait_s=10)
        if blocks[0] is not None:  # handed out while it was loaded: it ends in an error, not in wrong bytes
            with pytest.raises(BlockLost):
                for layer in range(BIG.num_layers):
                    blocks[0].wait_layer(layer)
        blocks.release()
        assert client.lookup(keys).states == b"\0"
        wait_until(lambda: not path.exists(), "the file is gone")


def test_grpc_waits_for_what_lies_on_disk(disk, wait_until, tmp_path):
    """The door of those without shared memory: Prefetch, and Get with wait_ms."""
    server = disk()
    with server.connect() as client, Calls(server.dir) as calls:
        keys = new_keys(6)
        put(client, keys, BIG)
        wait_until(lambda: len(files(tmp_path)) >= 6, "six files")
        evict(client, keys)
        found = {
            message.index: message.found
            for message in calls.store.Get(store_pb2.GetRequest(keys=keys[:3] + new_keys(1), wait_ms=10_000))
            if message.last
        }
        assert found == {0: True, 1: True, 2: True, 3: False}
        assert calls.store.Prefetch(store_pb2.PrefetchRequest(keys=keys[3:] + new_keys(2))).coming == 3
        wait_until(lambda: client.lookup(keys[3:]).resident == 3, "all are loaded")


def test_the_background_scrub_drops_what_changed_in_memory(disk, wait_until):
    with disk("--scrub-rate", "64MiB").connect() as client:
        key = new_keys(1)[0]
        layout_id = client.register_layout(SMALL.to_blob())
        with client.create([key], layout_id, priority=10) as writer:
            kept = writer[0].layer(2)
            for layer in range(SMALL.num_layers):
                shape = writer[0].layer(layer).shape
                writer[0].copy_layer(layer, pattern(key, layer, shape))
        assert client.lookup([key]).resident == 1
        kept.view(np.uint16)[1, 0, 3, 2] ^= 1
        wait_until(lambda: client.lookup([key]).states == b"\0", "the block is dropped")
        assert client.stats()["corrupt"] == 1


@pytest.mark.root
def test_a_pool_of_huge_pages_is_read_into_where_the_block_lies(disk, wait_until, tmp_path):
    """Blocks of several pieces: the first goes through a buffer, the others do not."""
    place, large = tmp_path / "huge", geometry(layers=5, heads=16, dim=64, tokens=128)
    place.mkdir()
    with huge_memory(place, 64):
        kv = disk("--pool-dir", str(place), memory="32MiB")
        assert "loads=in_place" in kv.log()
        keys = new_keys(6)
        with kv.connect() as client:
            put(client, keys, large)
            written(client, wait_until, 6)
            evict(client, keys, large)
            client.prefetch(keys)
            with client.get(keys, wait_s=10.0) as blocks:
                assert blocks.hits == 6
                for block in blocks:
                    check(block, large.num_layers)
                del block
            wait_until(lambda: client.stats()["disk_loaded"] >= 6, "all are counted")
        kv.stop()


def test_other_pools_are_read_into_through_buffers(disk):
    assert "loads=through_buffers" in disk("--pool", "memfd").log()
