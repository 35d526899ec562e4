"""The daemon's gRPC servers: the owner's, and one for other users.

Owns the servers, their sockets and their calls' admission. Never knows which services there are beside Store
and Transfer: a caller adds its own. Invariant: gRPC never stops a server. It is emptied and kept, and the
process ends with it: on a busy machine 3 of some 120 stops of a grpc.aio.Server were a SIGSEGV in a thread of
gRPC's own (grpcio 1.78).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import grpc

from kvstored.access.authorization import Door
from kvstored.config.config import Config
from kvstored.errors import StartupError
from kvstored.process import runtime_dir
from kvstored.rpc.admission import Admission
from kvstored.rpc.calls import CallCounts, Threads
from kvstored.rpc.leases import Leases
from kvstored.rpc.store import StoreService
from kvstored.rpc.transfer import TransferService
from kvstored.v1 import store_pb2_grpc, transfer_pb2_grpc


class Servers:
    def __init__(
        self, config: Config, stores: dict[str, Any], leases: Leases, threads: Threads, counts: CallCounts
    ) -> None:
        self._config, self._stores = config, stores
        self._leases, self._threads, self._counts = leases, threads, counts
        self._servers: list[tuple[grpc.aio.Server, str, Admission]] = []  # with each one's socket

    def add(self, name: str, door: Door, bounds: tuple[tuple[str, int], ...] = ()) -> grpc.aio.Server:
        """A server that start() will let listen on the socket `name` of the runtime directory. `bounds`: more
        of gRPC's options."""
        config = self._config
        admission = Admission(door, config.max_calls, self._counts)
        server = grpc.aio.server(
            interceptors=(admission,),
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.so_reuseport", 0),
                *bounds,
            ],
        )
        store = StoreService(door, self._stores, self._leases, self._threads, self._counts)
        store_pb2_grpc.add_StoreServicer_to_server(store, server)
        transfer = TransferService(door, self._stores, config.lease_timeout_s, self._threads, self._counts)
        transfer_pb2_grpc.add_TransferServicer_to_server(transfer, server)
        self._servers.append((server, config.in_dir(name), admission))
        return server

    async def start(self) -> None:
        """Raises StartupError where a socket cannot be had."""
        for server, path, _ in self._servers:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # a dead daemon's: the lock says that no other lives
                server.add_insecure_port(runtime_dir.grpc_address(path))
                os.chmod(path, 0o600)
            except (RuntimeError, OSError) as error:
                raise StartupError(f"{path}: {error}") from error
            await server.start()

    async def stop(self, drain_s: float) -> None:
        """Nobody finds a server any more; calls in progress have `drain_s`, and are cancelled then."""
        for _, path, _ in self._servers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        await asyncio.gather(*(admission.stop(drain_s) for _, _, admission in self._servers))
