"""Goal: create, seal, abort, look up, get, delete and stats mean the same through every door.
Method: the conformance suite through shared memory, the session socket, the C interface, gRPC and gRPC for
other users, each against a real daemon of its own.
"""

import pytest

from kvclient.testing.conformance import StoreConformance
from kvstored.v1 import admin_pb2
from tests.conformance.c_door import CClient
from tests.conformance.grpc_door import GrpcClient, GuestClient


class DaemonConformance(StoreConformance):
    """The suite against one daemon; after each case its tables are checked."""

    __test__ = False

    @pytest.fixture(autouse=True)
    def _with_daemon(self, shared_daemon):
        self.daemon = shared_daemon
        StoreConformance.setup_method(self)
        yield
        StoreConformance.teardown_method(self)
        with GrpcClient(str(self.daemon.dir / "grpc.sock")) as door:
            door.admin.Integrity(admin_pb2.IntegrityRequest(namespace="default"), timeout=30)

    def setup_method(self):
        """The fixture does it, when there is a daemon."""

    def teardown_method(self):
        """The fixture does it."""


class TestSharedMemory(DaemonConformance):
    __test__ = True

    def connect(self, **options):
        return self.daemon.connect(**options)


class TestSessionSocket(DaemonConformance):
    __test__ = True

    def connect(self, **options):
        return self.daemon.connect(door="socket", **options)


class TestC(DaemonConformance):
    """libkvstored_client.so, by ctypes."""

    __test__ = True
    lacks = frozenset({"pins", "sealing", "chains", "search"})

    def connect(self, **options):
        return CClient(str(self.daemon.dir), **options)


class TestGrpc(DaemonConformance):
    """The bytes are copies here: nothing is pinned."""

    __test__ = True
    lacks = frozenset(
        {
            "pins", "max_pins", "ordered_marks", "copies", "zeroed", "unwritten", "sealing", "chains",
            "search",
        }
    )

    def connect(self, **options):
        return GrpcClient(str(self.daemon.dir / "grpc.sock"), **options)


class TestGuestsGrpc(TestGrpc):
    """The socket for other users, with the token of a session that lives as long as the door. Its bytes go to
    the server of the cases above (kvstored/access/peer_proxy.py): here is each method and kind of stream.
    """

    CASES = frozenset(
        {
            "test_put_and_get_round_trip", "test_found_as_soon_as_seal_returned", "test_abort_leaves_nothing",
            "test_layers_arrive_in_order_while_they_are_written", "test_an_abort_reaches_the_follower",
            "test_the_end_of_the_writers_session_reaches_the_follower", "test_time_to_live",
            "test_wait_pending_sees_the_other_seal", "test_delete_twice", "test_touch_counts_what_is_there",
            "test_layouts_are_registered_once", "test_many_threads_share_one_client",
        }
    )  # fmt: skip
    for name in dir(StoreConformance):
        if name.startswith("test_") and name not in CASES:
            locals()[name] = None  # as pytest leaves an inherited test out
    assert all(hasattr(StoreConformance, name) for name in CASES)

    def connect(self, **options):
        return GuestClient(self.daemon, **options)
