"""Daemons that share a directory: each finds what another keeps there, and touches nothing of it.

Method: real daemons on one directory, no peers unless the test says so. Every block's bytes are a function of
its key. Files of others are cut, spoiled, replaced by what is no file and taken away while they are read:
each is a miss, and the file stays as it was.
"""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from kvclient.testing.conformance.case import BIG, SMALL, check, fill, new_keys
from kvstored.config.config import Config
from kvstored.errors import ConfigError, StartupError
from kvstored.process import runtime_dir
from kvstored.tiers.shared import claim
from tests.conftest import DaemonFailed
from tests.hosts.hosts import Hosts


@pytest.fixture
def shared(tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def hosts(daemon, tmp_path, shared):
    """Two daemons, n0 and n1, that know each other by the directory alone."""
    hosts = Hosts(daemon, tmp_path)
    for i in range(2):
        args = hosts[i].args
        for word in ("--peer", "--listen"):
            at = args.index(word)
            del args[at : at + 2]
        args += ["--disk-shared", str(shared), "--disk-quota", "64MiB", "--disk-write-priority", "0"]
    return hosts


def put(client, keys, geometry=SMALL):
    with client.create(keys, client.register_layout(geometry.to_blob())) as writer:
        for block in writer:
            fill(block, geometry.num_layers)


def got(client, keys, geometry=SMALL, wait_s=30.0):
    client.register_layout(geometry.to_blob())
    with client.get(keys, wait_s=wait_s) as blocks:
        for block, key in zip(blocks, keys, strict=True):
            if block is not None:
                check(block, geometry.num_layers)
                assert block.key == key
        return sum(block is not None for block in blocks)


def files(shared, node):
    return {path: path.stat().st_mtime_ns for path in (shared / node).rglob("*.kv")}


def kept(hosts, shared, wait_until, keys, geometry=SMALL):
    """Put by n0, whose daemon is gone then; its files."""
    with hosts[0].connect() as writer:
        put(writer, keys, geometry)
        wait_until(lambda: len(files(shared, "n0")) == len(keys), "they are on disk")
    hosts[0].kill()
    return files(shared, "n0")


@pytest.mark.parametrize("geometry", [SMALL, BIG], ids=["small", "big"])
def test_what_one_keeps_the_other_finds_and_touches_nothing(hosts, shared, wait_until, geometry):
    hosts.start()
    keys = new_keys(8)
    before = kept(hosts, shared, wait_until, keys, geometry)
    with hosts[1].connect() as reader:
        assert got(reader, keys, geometry) == 8
        assert got(reader, keys, geometry, wait_s=0) == 8  # and now it lies here
        assert got(reader, new_keys(3), geometry) == 0  # nobody keeps it: an answer
    assert files(shared, "n0") == before
    hosts[0].start()
    with hosts[0].connect() as client:
        assert got(client, keys, geometry) == 8


def spoil_header(path):
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"\xff")


def spoil_layer(path):
    with open(path, "r+b") as file:
        file.seek(4096 + 7)
        byte = file.read(1)
        file.seek(4096 + 7)
        file.write(bytes([byte[0] ^ 1]))


def cut(path):
    os.truncate(path, 4096 + 64)


def empty(path):
    os.truncate(path, 0)


def fifo(path):
    os.unlink(path)
    os.mkfifo(path)


def link(path):
    os.rename(path, path.with_suffix(".away"))
    os.symlink(path.with_suffix(".away"), path)


def other_block(path):
    shutil.copyfile(next(file for file in sorted(path.parents[2].rglob("*.kv")) if file != path), path)


def unreadable_directory(path):
    path.parents[1].chmod(0o777)  # somebody else could have put it there


@pytest.mark.parametrize(
    "wrong", [spoil_header, spoil_layer, cut, empty, fifo, link, other_block, os.unlink, unreadable_directory]
)
def test_a_file_that_is_not_what_it_says_is_a_miss_and_stays(hosts, shared, wait_until, wrong):
    hosts.start()
    keys = new_keys(2)
    before = kept(hosts, shared, wait_until, keys)
    (path,) = (file for file in before if file.stem == keys[0].hex())
    wrong(path)
    left = os.path.lexists(path)
    with hosts[1].connect() as reader:
        assert got(reader, keys[:1]) == 0
        assert reader.stats()["used_bytes"] == 0
        assert got(reader, keys[1:]) == (wrong is not unreadable_directory)
    assert os.path.lexists(path) == left


def test_files_that_come_and_go_while_they_are_read_give_right_blocks_or_none(hosts, shared, wait_until):
    hosts.start()
    keys = new_keys(4)
    before = kept(hosts, shared, wait_until, keys, BIG)
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            for path in before:
                whole = path.read_bytes()
                os.truncate(path, len(whole) // 2)
                os.unlink(path)
                path.write_bytes(whole)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        with hosts[1].connect() as reader:
            for _ in range(30):
                got(reader, keys, BIG)
                reader.delete(keys)
    finally:
        over.set()
        thread.join()
    with hosts[1].connect() as reader:
        wait_until(lambda: got(reader, keys, BIG) == 4, "all are there again")


def test_a_flush_is_of_its_own_daemon_and_its_files_are_no_blocks_any_more(hosts, shared, wait_until):
    hosts.start()
    keys = new_keys(3)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys)
        wait_until(lambda: len(files(shared, "n0")) == 3, "they are on disk")
        assert got(reader, keys[:1]) == 1
        asked = [sys.executable, "-m", "kvstored", "flush", "--yes", "--dir", str(hosts[0].dir)]
        subprocess.run(asked, check=True, stdout=subprocess.DEVNULL)
        wait_until(lambda: not files(shared, "n0"), "its files are gone")
        assert got(reader, keys[1:]) == 0
        assert got(reader, keys[:1], wait_s=0) == 1  # the copy here is this daemon's


def test_what_nobody_keeps_is_asked_of_the_peers(daemon, tmp_path, shared, wait_until):
    hosts = Hosts(daemon, tmp_path)
    for i in range(2):
        hosts[i].args += ["--disk-shared", str(shared), "--disk-quota", "64MiB"]
    hosts.start().wait_up(wait_until)
    keys = new_keys(4)
    with hosts[0].connect() as writer, hosts[1].connect() as reader:
        put(writer, keys)
        assert not files(shared, "n0")
        assert got(reader, keys) == 4
        assert got(reader, new_keys(2)) == 0
    assert hosts.peers(1)["n0"]["fetched"] == 4


def test_two_daemons_of_one_name_do_not_write_in_one_part(hosts, shared, daemon):
    hosts.start()
    args = [word if word != "n1" else "n0" for word in hosts[1].args[5:]]
    second = daemon("64MiB", args, start=False)
    with pytest.raises(DaemonFailed, match="another `node`"):
        second.start()
    (shared / "n0" / "owner").write_text('{"machine": "m", "host": "elsewhere", "dir": "/run/kvstored"}')
    hosts[0].kill()
    with pytest.raises(DaemonFailed, match="elsewhere"):
        hosts[0].start()
    (shared / "n0" / "owner").unlink()
    hosts[0].start()
    hosts[0].stop()
    shared.chmod(0o777)
    with pytest.raises(DaemonFailed, match="writable by nobody else"):
        hosts[0].start()


def test_of_two_that_start_at_the_same_moment_one_has_the_part(tmp_path, monkeypatch):
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o755)
    made = Config(dir=str(tmp_path), node="a", disk_shared=str(directory), disk_quota=64 << 20)
    other, said = {"machine": "m", "host": "elsewhere", "dir": "/run/kvstored"}, json.dumps

    def late(about):  # it has looked, and found nobody
        (directory / "a" / "owner").write_text(said(other))
        return said(about)

    monkeypatch.setattr(json, "dumps", late)
    with pytest.raises(StartupError, match="elsewhere"):
        claim(made)
    assert json.loads((directory / "a" / "owner").read_text()) == other
    assert [path.name for path in (directory / "a").iterdir()] == ["owner"]


def test_of_two_that_find_an_owner_who_is_dead_one_has_the_part(tmp_path, monkeypatch):
    """The second starts when the first has seen that nobody runs, and has written nothing yet."""
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o755)
    made = [
        Config(dir=str(tmp_path / name), node="a", disk_shared=str(directory), disk_quota=64 << 20)
        for name in ("dead", "first", "second")
    ]
    claim(made[0])
    results, stands, flock = {}, threading.Event(), fcntl.flock

    def try_to(config):
        try:
            claim(config)
        except StartupError as error:
            results[config.dir] = str(error)
        else:
            results[config.dir] = ""

    def locked(fd, how):
        try:
            flock(fd, how)
        except OSError:
            stands.set()
            raise

    def running(path):
        if path != os.path.realpath(made[0].dir):
            return 1
        if threading.current_thread() is first:
            second.start()
            while second.is_alive() and not stands.wait(0.01):
                pass
        return None

    first, second = (threading.Thread(target=try_to, args=(config,)) for config in made[1:])
    monkeypatch.setattr(fcntl, "flock", locked)
    monkeypatch.setattr(runtime_dir, "running_pid", running)
    first.start()
    first.join()
    second.join()
    assert results[made[1].dir] == "" and "another `node`" in results[made[2].dir]
    assert json.loads((directory / "a" / "owner").read_text())["dir"] == os.path.realpath(made[1].dir)


@pytest.mark.parametrize("error", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_a_directory_has_no_lock_the_part_is_claimed_without(tmp_path, monkeypatch, error):
    def none(fd, how):
        raise OSError(error, os.strerror(error))

    directory = tmp_path / "kv"
    directory.mkdir(mode=0o755)
    monkeypatch.setattr(fcntl, "flock", none)
    claim(Config(dir=str(tmp_path), node="a", disk_shared=str(directory), disk_quota=64 << 20))
    assert (directory / "a" / "owner").exists()


def test_what_is_not_shared_is_not_kept_where_others_read(hosts, shared, wait_until, tmp_path):
    """A namespace of the same name is shared on the other host, which would find it."""
    args, disk = hosts[0].args, tmp_path / "disk"
    disk.mkdir(mode=0o700)
    at = next(i for i, word in enumerate(args) if word.startswith("default:"))
    args[at] = ":".join(word for word in args[at].split(":") if not word.startswith("share="))
    args += ["--disk", str(disk)]
    hosts.start()
    keys = new_keys(3)
    with hosts[0].connect() as first, hosts[1].connect() as second:
        put(first, keys)
        wait_until(lambda: len(list(disk.rglob("*.kv"))) == len(keys), "they are on its own disk")
        assert not files(shared, "n0")
        assert got(second, keys, wait_s=0.5) == 0


def test_the_configuration_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="node"):
        Config(dir="/tmp/x", disk_shared="/mnt/a", disk_quota=64 << 20)
    with pytest.raises(ConfigError, match="disk_quota"):
        Config(dir="/tmp/x", node="a", disk_shared="/mnt/a")
    made = Config(dir="/tmp/x", node="a", disk=("/b",), disk_shared="/mnt/a", disk_quota=64 << 20)
    assert made.disks == ("/b", "/mnt/a/a")
