"""Goal: what protects a shared block from its readers, and the memory from other users. torch has no
read-only tensors: an in-place operation on a shared block ends the process by SIGSEGV instead of changing
the block. Other users get memory only over the socket, after their credentials were checked (peers' case
17). Method: forked children that do the forbidden thing; users other than root by setuid in a child after
all imports.
"""

import ctypes
import os
import re
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

import kvclient
from kvclient.errors import KVClientError, NotPermitted, Unavailable
from kvclient.testing.conformance.case import SMALL, check, fill, new_keys
from tests.daemon.memory.test_regions_pieces import BLOB, PAGE, apart
from tests.descriptors import sockets
from tests.fault.children import as_user

STRANGER = 12_345
GUEST = 12_346
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def put(client, keys):
    layout = client.register_layout(SMALL.to_blob())
    with client.create(keys, layout) as writer:
        for index in writer.granted:
            fill(writer[index])


@pytest.fixture
def started(daemon):
    return daemon(memory="8MiB", args=("--namespaces", f"default:writers={GUEST}"))


def prefix_of(started) -> str:
    """How the names of this daemon's memory begin."""
    return re.search(r"kvstored-[0-9a-f]{16}", (started.dir / "state.json").read_text())[0]


def segments_of(started) -> list[str]:
    found = [str(path) for path in Path("/dev/shm").glob(prefix_of(started) + "*")]
    assert len(found) >= 3
    return found


def dies_writing(fork, write) -> None:
    """`write(block)` must end its process by a signal."""
    child = fork(write)
    while child.next_step():
        child.go_on()
    assert child.wait() == -signal.SIGSEGV, f"the process ended with {child.status} instead of SIGSEGV"


def test_an_in_place_operation_on_a_tensor_faults(started, fork):
    torch = pytest.importorskip("torch")
    client = started.connect()
    keys = new_keys(1)
    put(client, keys)

    def work(_steps) -> None:
        with started.connect().get(keys) as blocks:
            tensor = blocks[0].tensor(1)
            assert tensor.shape == (2, 2, 16, 8) and tensor.dtype == torch.float16
            assert torch.equal(tensor, torch.from_numpy(blocks[0].layer(1).copy()))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            tensor.add_(1)

    dies_writing(fork, work)
    with client.get(keys) as blocks:
        check(blocks[0])


def test_a_write_through_the_address_faults(started, fork):
    client = started.connect()
    keys = new_keys(1)
    put(client, keys)

    def work(_steps) -> None:
        with started.connect().get(keys) as blocks:
            address = blocks[0].layer(0).ctypes.data
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.memset(address, 0, 1)

    dies_writing(fork, work)
    with client.get(keys) as blocks:
        check(blocks[0])


@pytest.mark.parametrize("lies", ["in one piece", "apart"])
def test_a_write_to_a_block_in_another_clients_region_faults(started, fork, lies):
    client, keys = started.connect(), new_keys(1)
    layout = client.register_layout(BLOB)
    with client.register_region(64 * PAGE) as region:
        region.array[:] = 7
        place = apart([5, 3, 20, 11, 40, 41]) if lies == "apart" else region.buffers_at(layout, [0])
        assert region.register(keys, layout, place, in_place=True)[0].in_place

        def work(_steps) -> None:
            with started.connect().get(keys) as blocks:
                address = blocks[0].layer(0).ctypes.data
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                ctypes.memset(address, 0, 1)

        dies_writing(fork, work)
        with client.get(keys, verify=True) as blocks:
            assert (blocks[0].layer(0).view(np.uint8) == 7).all()


def test_the_fake_protects_its_blocks_the_same_way(fork):
    client = kvclient.InMemoryClient(1 << 20)
    keys = new_keys(1)
    put(client, keys)

    def work(_steps) -> None:
        address = client.get(keys)[0].layer(0).ctypes.data
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(address, 0, 1)

    dies_writing(fork, work)


def test_arrays_cannot_be_made_writable(started):
    client = started.connect()
    keys = new_keys(1)
    put(client, keys)
    with client.get(keys) as blocks:
        array = blocks[0].layer(0)
        with pytest.raises(ValueError):
            array.flags.writeable = True
        with pytest.raises((ValueError, BufferError)):
            np.frombuffer(blocks[0].view, np.uint8)[0] = 1


def test_a_read_only_client_reads_only(started):
    writer = started.connect()
    keys = new_keys(1)
    put(writer, keys)
    with started.connect(read_only=True) as client:
        with client.get(keys) as blocks:
            check(blocks[0])
        for call in (
            lambda: client.create(new_keys(1), 0),
            lambda: client.delete(keys),
            lambda: client.register_layout(SMALL.to_blob()),
        ):
            with pytest.raises(NotPermitted):
                call()
    assert writer.lookup(keys).resident == 1


@needs_root
@pytest.mark.root
def test_a_stranger_gets_nothing(started, fork):
    owner = started.connect()
    keys = new_keys(1)
    put(owner, keys)
    segments = segments_of(started)

    def work(_steps) -> None:
        with pytest.raises((NotPermitted, Unavailable)):
            started.connect()
        for path in segments:
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDONLY)
        with pytest.raises(PermissionError):
            os.open(f"/proc/{started.pid}/fd", os.O_RDONLY)

    fork(as_user(STRANGER, work)).finish()

    def nobody(_steps) -> None:
        with pytest.raises((NotPermitted, Unavailable)):
            started.connect()

    fork(as_user(65_534, nobody)).finish()
    assert owner.lookup(keys).resident == 1


@needs_root
@pytest.mark.root
def test_a_guest_is_served_but_opens_nothing_by_name(started, fork, nothing_leaks):
    owner = started.connect()
    keys, theirs = new_keys(1), new_keys(2)
    put(owner, keys)
    segments = segments_of(started)

    def work(_steps) -> None:
        client = started.connect()
        with client.get(keys) as blocks:
            check(blocks[0])
        put(client, theirs)
        for path in segments:
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDWR)
        reader = started.connect(read_only=True)
        with reader.get(theirs) as blocks:
            check(blocks[0])
        client.close()

    fork(as_user(GUEST, work)).finish()
    with owner.get(theirs) as blocks:
        check(blocks[1])
    del blocks
    nothing_leaks(started, owner, [*keys, *theirs])


@needs_root
@pytest.mark.root
def test_a_read_only_guest_cannot_reopen_its_memory_for_writing(started, fork):
    keys = new_keys(1)
    put(started.connect(), keys)

    prefix = prefix_of(started)

    def work(_steps) -> None:
        client = started.connect(read_only=True)
        client.get(keys)
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            try:
                if prefix in os.readlink(path):
                    with pytest.raises(PermissionError):
                        os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
        for line in Path("/proc/self/maps").read_text().splitlines():
            if prefix in line and ".s." not in line:
                assert line.split()[1].startswith("r-"), line

    fork(as_user(GUEST, work)).finish()


def test_modes_of_what_lies_in_the_file_system(started):
    for path in segments_of(started):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path
    assert stat.S_IMODE(os.stat(started.dir / "grpc.sock").st_mode) & 0o077 == 0
    assert stat.S_IMODE(os.stat(started.socket_path).st_mode) == 0o666, "guests connect; credentials decide"


def test_a_daemon_without_guests_lets_nobody_else_connect(daemon):
    alone = daemon(memory="8MiB")
    assert stat.S_IMODE(os.stat(alone.socket_path).st_mode) == 0o600


def test_namespaces_do_not_see_each_other(daemon):
    """Peers' case 19, C14: a key of one namespace is nothing in another, and neither is its memory."""
    started = daemon(memory="16MiB", args=("--namespaces", "default=0.5,other=0.5"))
    here, there = started.connect(), started.connect(namespace="other")
    keys = new_keys(3)
    put(here, keys)
    assert there.lookup(keys).resident == 0 and there.delete(keys) == 0
    with there.get(keys) as blocks:
        assert blocks.hits == 0
    assert there.stats()["used_bytes"] == 0
    put(there, keys[:1])
    assert here.delete(keys) == 3
    assert there.lookup(keys).resident == 1
    with pytest.raises(KVClientError):
        started.connect(namespace="unknown")


def test_the_daemon_listens_on_no_network(started):
    """Peers' case 17: without --metrics-port there is no TCP or UDP socket at all."""
    inodes = sockets(started.pid)
    assert inodes, "its Unix sockets at least"
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{started.pid}/net/{table}").read_text().splitlines()[1:]:
            assert line.split()[9] not in inodes, f"{table}: {line}"


def test_nothing_is_pickled():
    """Peers' case 18: no format that runs code when it is read, on a wire or in a file, and no eval."""
    root = Path(__file__).resolve().parents[2]
    runs_code = re.compile(
        r"\b(import|from)\s+(c?[Pp]ickle|cloudpickle|dill|marshal|shelve|joblib)\b|\btorch\.(load|save)\("
        r"|allow_pickle|\byaml\.(load|unsafe_load)\(|(?<![\w.])(eval|exec)\("
    )
    for caught in ("import pickle", "torch.load(", "eval(x)", "np.load(f, allow_pickle=True)"):
        assert runs_code.search(caught), caught
    parts = ("kvstored", "kvclient", "bench", "examples", "deploy")
    sources = [path for part in parts for path in (root / part).rglob("*.py")]
    assert len(sources) > 80
    for path in sources:
        found = runs_code.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"
