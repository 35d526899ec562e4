"""Calls before their message is read: counted, refused with a status, and given back when they leave.

Method: a real daemon, and calls whose message is held back, is none, or never was. A method of one message is
called as one of a stream: then gRPC's client sends the call's head at once.
"""

import threading

import grpc
import pytest

from tests.daemon.grpc_calls import CALL_S, INVALID, Calls, refused
from tests.fault.children import eventually

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
HEALTH, REFLECTION = "/grpc.health.v1.Health", "/grpc.reflection.v1alpha.ServerReflection"


def begin(calls, method, messages, **options):
    """A call of a method that answers with one message, or with a stream of them."""
    if method.endswith(("/Get", "/Watch")):
        return calls.channel.stream_stream(method)(messages, **options)
    return calls.channel.stream_unary(method).future(messages, **options)


@pytest.mark.parametrize(
    "method",
    ["/kvstored.v1.Store/Lookup", "/kvstored.v1.Store/Get", "/kvstored.v1.Store/Write", HEALTH + "/Check"],
)
def test_a_call_whose_message_never_comes_is_counted(daemon, method):
    """Of 60 as many stay as max_calls allows; gRPC's own bound lets about half of the others stay too."""
    kvstored = daemon(memory="16MiB", args=("--max-calls", "8"))
    over = threading.Event()

    def silent():
        over.wait()
        yield from ()

    with Calls(kvstored.dir) as calls:
        held = [begin(calls, method, silent()) for _ in range(60)]
        eventually(lambda: sum(call.done() for call in held) == 52, "8 stay", timeout_s=20)
        for call in held:
            if call.done():
                assert call.code() is FULL and call.details() == (
                    "8 calls are in progress, the limit is 8 (max_calls)"
                )
        refused(lambda: calls.states("a"), FULL, "8 (max_calls)")
        for call in held:
            call.cancel()
        over.set()

        def served() -> bool:
            try:
                return calls.states("a") == [0]
            except grpc.RpcError:
                return False

        eventually(served, "their places are free again", timeout_s=20)
    assert "Traceback" not in kvstored.log() and "call_failed" not in kvstored.log()


@pytest.mark.parametrize("method", ["/kvstored.v1.Store/Lookup", "/kvstored.v1.Store/Get", HEALTH + "/Watch"])
def test_a_call_that_ends_without_its_message_is_an_invalid_argument(calls, method):
    call = begin(calls, method, iter(()), timeout=CALL_S)
    eventually(call.done, "it ends", timeout_s=20)
    assert (call.code(), call.details()) == (INVALID, "the call ended without its message")
    assert "Traceback" not in calls.daemon.log()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", HEALTH + "/Check"),
        ("unary_stream", HEALTH + "/Watch"),
        ("stream_stream", REFLECTION + "/ServerReflectionInfo"),
    ],
)
def test_bytes_that_are_no_message_of_a_service_of_grpcs_own(calls, kind, method):
    request = b"\x0a\xff\xff" if kind != "stream_stream" else iter([b"\x0a\xff\xff"])
    refused(lambda: getattr(calls.channel, kind)(method)(request, timeout=CALL_S), INVALID, "no message")
    assert "Traceback" not in calls.daemon.log()
