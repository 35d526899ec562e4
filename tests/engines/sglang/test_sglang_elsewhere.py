"""Goal: SGLang finds the pages that are not in its daemon's memory: those that another host's daemon holds,
where it is told to look there, and those that lie on disk.

Method: a backend of SGLang's making on each daemon; what came from where is counted by the daemon.
"""

import pytest
import torch

from tests.engines.conftest import on_disk, start_anew
from tests.engines.sglang.sglang_package import HostPool, hashes
from tests.hosts.hosts import Hosts, told

pytestmark = pytest.mark.engines


def test_pages_of_another_hosts_daemon_are_found(daemon, make, tmp_path, wait_until):
    """Where `fetch_wait_s` says so, as far as they reach; nobody waits for a host that is gone."""
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    filled, pool, keys = HostPool(), HostPool(), hashes(0, 6)
    writer = make(hosts[0], {"kv": filled})
    reader, alone = make(hosts[1], {"kv": pool}, {"fetch_wait_s": 60}), make(hosts[1])
    for page in range(5):
        filled.fill(page + 1, page)
    assert all(writer.batch_set_v1(keys[:5], filled.slots([1, 2, 3, 4, 5])))
    told(hosts[1].connect(), writer._pool("kv").names.keys(keys[:5]))
    assert alone.batch_exists(keys) == 0
    assert reader.batch_exists(keys[:4]) == 4
    assert hosts.peers(1)["n0"]["fetched"] == 4
    assert reader.batch_get_v1(keys[:4], pool.slots([1, 2, 3, 4])) == [True] * 4
    assert reader.batch_exists_v2(keys).kv_hit_pages == 5
    assert reader.batch_get_v1(keys[4:], pool.slots([5, 6])) == [True, False]
    assert all(torch.equal(pool.page(page), filled.page(page)) for page in range(1, 6))
    assert hosts.peers(1)["n0"]["fetched"] == 5
    client = hosts[1].connect()
    wait_until(lambda: client.stats()["pins"] == 0, "what was brought is held no more")
    assert all(writer.batch_set_v1(hashes(50, 2), filled.slots([1, 2])))
    told(client, writer._pool("kv").names.keys(hashes(50, 2)))
    hosts[0].kill()
    assert reader.batch_exists(hashes(50, 2)) == 0


def test_pages_are_found_after_a_restart_and_from_disk(daemon, make, tmp_path, wait_until):
    """By the backend that stored them, which lived on, and by a new one."""
    kvstored, keys, slots = daemon(args=on_disk(tmp_path)), hashes(0, 6), [1, 2, 3, 4, 5]
    extra = {"timeout_s": 5.0, "wait_s": 30.0}
    filled, pool = HostPool(), HostPool()
    writer = make(kvstored, {"kv": pool}, extra)
    for page in slots:
        filled.fill(page, page)
        pool.fill(page, page)
    assert all(writer.batch_set_v1(keys[:5], pool.slots(slots)))
    with kvstored.connect() as client:
        wait_until(lambda: client.stats()["disk_files"] >= 5, "all is on disk")
    for begin, of_disk in ((kvstored.restart, False), (lambda: start_anew(kvstored), True)):
        begin()
        wait_until(lambda: writer.batch_exists(keys) == 5, "it is taken up")
        with kvstored.connect() as client:
            assert client.stats()["pins"] >= 5, "there means pinned, of what lay on disk, too"
        another = HostPool()
        for backend, pages in ((writer, pool), (make(kvstored, {"kv": another}, extra), another)):
            pages.kv_buffer.zero_()
            assert backend.batch_exists(keys) == 5
            assert backend.batch_get_v1(keys, pages.slots([*slots, 6])) == [True] * 5 + [False]
            assert torch.equal(pages.kv_buffer, filled.kv_buffer)
        with kvstored.connect() as client:
            assert (client.stats()["disk_loaded"] > 0) is of_disk
