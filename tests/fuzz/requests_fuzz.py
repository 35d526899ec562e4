"""atheris: the bytes of a gRPC request to the Store service. Each is no message, or is answered, or refused
with a status of the table; INTERNAL would be a bug. `make fuzz` runs it.

The service is the real one over a real store in this process; only the sockets are missing.
"""

import asyncio
import shutil
import sys

import atheris

with atheris.instrument_imports(
    include=["kvstored.service", "kvstored.rpc.calls", "kvstored.rpc.leases", "kvstored.rpc.layouts"]
):
    from kvstored.access.authorization import OwnersDoor
    from kvstored.rpc.calls import CallCounts, Threads
    from kvstored.rpc.leases import Leases
    from kvstored.rpc.store import StoreService

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from kvstored.v1 import store_pb2
from tests.property.in_process import InProcessDaemon

METHODS = list(store_pb2.DESCRIPTOR.services_by_name["Store"].methods)
CLASSES = {method.name: message_factory.GetMessageClass(method.input_type) for method in METHODS}
CHECK_EVERY = 1000
LONGEST_S = 20.0


class Context:
    """As much of a call's context as a handler touches."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None

    def set_code(self, status: grpc.StatusCode) -> None:
        self.status = status

    def set_details(self, _details: str) -> None:
        pass

    def invocation_metadata(self) -> tuple:
        return ()

    def time_remaining(self) -> float:
        return 0.001

    def cancelled(self) -> bool:
        return False

    def add_done_callback(self, _callback) -> None:
        pass


class Service:
    def __init__(self) -> None:
        self.daemon = InProcessDaemon(8 << 20, 256)
        shutil.rmtree(self.daemon.directory)  # what is open is enough, and a fuzzer ends without a farewell
        stores = {"default": self.daemon.store}
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        leases = Leases(16, 1.0, lambda *_: None)
        self.service = StoreService(OwnersDoor(stores), stores, leases, Threads(1), CallCounts())
        self.inputs = 0

    def one(self, data: bytes) -> None:
        if not data:
            return
        method = METHODS[data[0] % len(METHODS)]
        if method.client_streaming or method.server_streaming or method.name.startswith("Wait"):
            return
        try:
            request = CLASSES[method.name].FromString(data[1:])
        except DecodeError:
            return
        context = Context()
        call = getattr(self.service, method.name)(request, context)
        self.loop.run_until_complete(asyncio.wait_for(call, LONGEST_S))
        assert context.status is not grpc.StatusCode.INTERNAL, (method.name, request)
        self.inputs += 1
        if self.inputs % CHECK_EVERY == 0:
            self.daemon.store.check_integrity()


def main() -> None:
    atheris.Setup(sys.argv, Service().one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
