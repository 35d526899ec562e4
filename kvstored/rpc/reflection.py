"""gRPC reflection, imported when the first tool asks: most daemons never need it, and it costs start-up
time and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

SERVICES = ("kvstored.v1.Store", "kvstored.v1.Admin", "kvstored.v1.Transfer", "grpc.health.v1.Health")
_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class LazyReflection(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers the one method of the reflection service."""

    def __init__(self) -> None:
        self._handler: Callable[[Any], Any] | None = None

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        if call.method != _METHOD:
            return None
        if self._handler is None:
            from grpc_reflection.v1alpha import reflection, reflection_pb2

            servicer = reflection.aio.ReflectionServicer((*SERVICES, reflection.SERVICE_NAME))
            self._handler = grpc.stream_stream_rpc_method_handler(
                servicer.ServerReflectionInfo,
                request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
                response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
        return self._handler
