"""What the tests of whole processes share."""

import pytest

from kvstored.v1 import admin_pb2
from tests.daemon.grpc_calls import CALL_S, Calls


@pytest.fixture
def calls(daemon):
    """A daemon and its gRPC services. Whatever the test did, the store must be consistent after it."""
    kvstored = daemon(memory="64MiB")
    with Calls(kvstored.dir) as services:
        services.daemon = kvstored
        yield services
        if kvstored.process.poll() is None:
            services.admin.Integrity(admin_pb2.IntegrityRequest(), timeout=CALL_S)
