"""Goal: what kvstored.h says of waiting, forking and prefetching, beyond what the suite asks of every door: a
call that waits for nothing does not wait for another thread's question to the daemon, and a forked child that
says so has a client of its own, whatever its parent's threads were doing.

Method: a daemon that is stopped, a thread that asks it for a layout, and calls and a fork beside that thread.
"""

import ctypes as c
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import kvclient
from tests.conformance.c_door import LIB, CClient, LayoutStruct, _packed
from tests.conformance.test_shared_writer import RECVMSG, Other, numbered
from tests.conftest import wait_for

BLOB = kvclient.Layout(1, 1, 8, "float16", 4, meta_fixed=0, meta_per_token=0).geometry.to_blob()


def ask_for_another_layout(client):
    layout, number = LayoutStruct(2, 2, 1, 8, 1, 16), c.c_uint32()
    LIB.kvs_register_layout(client._pointer, c.byref(layout), c.byref(number))


def stands_still(pid):
    stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in stats)


@contextmanager
def a_thread_asks(server, client) -> Iterator[Other]:
    """And has no answer before this ends."""
    os.kill(server.pid, signal.SIGSTOP)
    wait_for(lambda: stands_still(server.pid), "the daemon stands still")
    asking = Other(lambda: ask_for_another_layout(client))
    try:
        wait_for(lambda: asking.waits_in(RECVMSG), "the daemon is asked")
        yield asking
    finally:
        os.kill(server.pid, signal.SIGCONT)
        asking.join()


@numbered
def test_how_a_block_lies_is_told_while_another_thread_asks_the_daemon(daemon):
    server = daemon()
    with CClient(str(server.dir), timeout_s=60.0) as client:
        small, size = client.register_layout(BLOB), c.c_uint64()
        with a_thread_asks(server, client) as asking:
            told = LIB.kvs_block_bytes(client._pointer, c.c_uint32(small), c.c_uint32(0), c.byref(size))
            assert asking.is_alive(), "it waited"
        assert told == 0 and size.value > 0


def put(client, layout, key, value):
    with client.create([key], layout) as writer:
        writer[0].layer(0)[...] = value


def holds(client, key, value):
    with client.get([key], verify=True) as blocks:
        return blocks[0] is not None and bool((blocks[0].layer(0) == value).all())


@numbered
def test_a_forked_child_that_says_so_goes_on_by_itself(daemon):
    server, mine, childs = daemon(), b"a" * 32, b"b" * 32
    with CClient(str(server.dir), timeout_s=60.0) as client:
        small = client.register_layout(BLOB)
        put(client, small, mine, 1)
        with a_thread_asks(server, client):
            child = os.fork()
            if child == 0:
                with suppress(BaseException):
                    LIB.kvs_after_fork(client._pointer)
                    put(client, small, childs, 2)
                    os._exit(not (holds(client, mine, 1) and holds(client, childs, 2)))
                os._exit(2)
        ended = []
        try:
            wait_for(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0], "the child ends")
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        assert os.waitstatus_to_exitcode(ended[-1][1]) == 0
        assert list(client.lookup([mine, childs]).states) == [2, 2]


def test_a_prefetch_counts_what_is_there_or_comes(daemon):
    with CClient(str(daemon().dir)) as client:
        put(client, client.register_layout(BLOB), b"a" * 32, 1)
        names, count = _packed([b"a" * 32, b"b" * 32]), c.c_size_t()
        asked = LIB.kvs_prefetch(client._pointer, names, c.c_size_t(2), c.c_uint32(35), c.byref(count))
        assert (asked, count.value) == (0, 1)
