"""What daemons tell each other of the blocks they have: a look-up knows, and what nobody has costs nothing.

Real daemons on addresses of loopback. A look-up is asked again until it says what is waited for: word takes
some milliseconds.
"""

from kvclient.testing.conformance.case import BIG, SMALL, check, new_keys
from tests.hosts.hosts import Hosts
from tests.hosts.test_peers import checked, put

ON_PEER = 4


def messages(hosts, i) -> int:
    """Answers that host i had from its peers, of any kind."""
    kinds = ("fetched", "missing", "busy", "lost", "failed", "needless")
    return sum(counts[kind] for node, counts in hosts.peers(i).items() if node != "server" for kind in kinds)


def test_a_look_up_says_what_lies_on_other_hosts_and_what_nobody_has_costs_no_message(
    daemon, tmp_path, wait_until
):
    hosts = Hosts(daemon, tmp_path, count=3).start().wait_up(wait_until)
    keys, more = new_keys(6), new_keys(2)
    with hosts[0].connect() as here, hosts[1].connect() as there, hosts[2].connect() as reader:
        put(here, keys[:4])
        put(there, keys[4:])
        wait_until(lambda: reader.lookup(keys, peers=True).on_peers == 6, "word of all came")
        assert bytes(reader.lookup(keys, peers=True).states) == bytes([ON_PEER]) * 6
        checked(reader.get(keys[:2], wait_s=30), keys[:2], SMALL)
        seen = reader.lookup(keys + more, peers=True)
        assert (seen.resident, seen.on_peers) == (2, 4) and "4 on peers" in repr(seen)
        assert bytes(seen.states[-2:]) == bytes(2)
        here.delete(keys[2:4])
        wait_until(lambda: reader.lookup(keys[2:4], peers=True).states == bytes(2), "they went from there")
        assert messages(hosts, 2) == 2, "look-ups ask nobody"
        assert bytes(reader.lookup(keys).states[2:]) == bytes(4), "without peers: this host alone"

        for keys in (new_keys(64) for _ in range(20)):
            assert reader.prefetch(keys) == 64  # word may be on its way
            assert list(reader.get(keys, wait_s=30)) == [None] * 64
            assert reader.prefetch(keys) == 0
        assert messages(hosts, 2) == 2, "what nobody has costs none either"

        for keys in (new_keys(1) for _ in range(5)):  # a miss just now, and then there is one
            assert reader.get(keys, wait_s=30)[0] is None
            put(here, keys)
            wait_until(lambda keys=keys: reader.lookup(keys, peers=True).on_peers == 1, "word came")
            check(reader.get(keys, wait_s=30)[0], SMALL.num_layers)


def test_a_peer_that_is_gone_is_no_hope(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path).start().wait_up(wait_until)
    keys = new_keys(3)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys)
        wait_until(lambda: reader.lookup(keys, peers=True).on_peers == 3, "word came")
        hosts[0].kill()
        wait_until(lambda: reader.lookup(keys, peers=True).on_peers == 0, "it is gone")
        hosts[0].start()
        wait_until(lambda: reader.lookup(keys, peers=True).on_peers == 3, "its pool was adopted")


def test_what_lies_on_the_other_hosts_disk_is_loaded_there(daemon, tmp_path, wait_until):
    hosts = Hosts(daemon, tmp_path)
    disk = ["--disk", str(tmp_path / "disk"), "--disk-quota", "64MiB", "--disk-write-priority", "0"]
    hosts.made[0].args += disk
    hosts.start().wait_up(wait_until)
    keys = new_keys(4)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys, BIG)
        wait_until(lambda: writer.stats()["disk_written"] >= 4, "they are on disk")
        hosts[0].stop()
        hosts[0].args.append("--fresh")
        hosts[0].start()
        with hosts[0].connect() as again:
            again.register_layout(BIG.to_blob())
        wait_until(lambda: reader.lookup(keys, peers=True).on_peers == 4, "word came")
        checked(reader.get(keys, wait_s=60), keys, BIG)
