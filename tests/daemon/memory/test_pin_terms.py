"""Who holds blocks, and on what terms: an engine's pins end at their deadline, an operator asks for them.

Method: a real daemon and real clients; memory is seen to stay as long as an array is there, and to come back
after. The rules themselves are in native/tests/pin_owners_test.cc.
"""

import json
import os

import pytest

from kvclient import Layout
from kvclient.errors import BlockLost, InvalidArgument
from kvstored.cli.main import main
from tests.fault.children import eventually

LAYOUT = Layout(1, 1, 1024, "uint8", 128)  # 128 KiB a block


def put(client, fill: int) -> bytes:
    key = os.urandom(32)
    with client.create([key], client.register_layout(LAYOUT)) as writer:
        writer[0].layer(0)[:] = fill
    return key


def status(kvstored, capsys, *more: str) -> dict:
    assert main(["status", "--dir", str(kvstored.dir), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def kvstored(daemon):
    return daemon(memory="16MiB")


def test_an_engine_holds_nothing_beyond_its_deadline(kvstored, capsys):
    writer = kvstored.connect()
    engine = kvstored.connect(owner="engine", pin_deadline_s=0.05)
    key = put(writer, 7)
    blocks, other = engine.get([key]), engine.get([key])
    view, array = blocks[0], other[0].layer(0)
    found = status(kvstored, capsys, "--sessions")
    counters = found["namespaces"][0]["counters"]
    assert counters["pins_engine"] <= 2 and counters["pinned_engine_bytes"] % (128 << 10) <= 8192
    mine = {session["session"]: session for session in found["sessions"]}[engine._native.session]
    assert (mine["owner"], mine["pin_deadline_ms"], mine["device"]) == ("engine", 50, False)
    writer.delete([key])

    def lost():
        try:
            view.layer(0)
        except BlockLost as error:
            return "asked these blocks back, held for 50 ms" in str(error)
        return False

    eventually(lost, "what is asked back is lost")
    with pytest.raises(BlockLost):
        memoryview(view)
    with pytest.raises(BlockLost):
        other[0].layer(0)
    for fill in range(200):  # the pool turns over; what the array shows stays
        put(writer, fill % 5)
    assert (array == 7).all()
    del array
    eventually(lambda: writer.stats()["zombies"] == 0, "its memory comes back")
    assert writer.stats()["pins_engine"] == 0
    again = put(writer, 9)
    assert (engine.get([again])[0].layer(0) == 9).all(), "the client goes on as before"


def test_an_operator_asks_a_process_for_its_blocks(kvstored, capsys):
    client = kvstored.connect()
    key = put(client, 3)
    blocks = client.get([key])
    command = ["revoke", "--dir", str(kvstored.dir), str(client._native.session)]
    assert main(command) == 0
    assert "asked for the blocks of session" in capsys.readouterr().out
    with pytest.raises(BlockLost, match="asked these blocks back"):
        blocks[0].layer(0)
    assert (client.get([key])[0].layer(0) == 3).all(), "what is pinned from here on is not meant"
    assert main([*command[:-1], "4000000000"]) == 1
    assert main(["status", "--dir", str(kvstored.dir), "--sessions"]) == 0
    assert "client" in capsys.readouterr().out


def test_terms_are_checked(kvstored):
    for wrong in ({"owner": "disk"}, {"pin_deadline_s": 0}, {"pin_deadline_s": 1e9}, {"pin_bytes": 0}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            kvstored.connect(**wrong)


def test_more_than_its_bytes_is_asked_back_the_oldest_first(kvstored):
    client = kvstored.connect(pin_bytes=300 << 10)  # two blocks
    keys = [put(client, fill) for fill in range(4)]
    first = client.get(keys[:2])
    eventually(lambda: client.stats()["pins_client"] == 2, "two are left")
    late = [client.get([key]) for key in keys[2:]]

    def over():
        client.get([os.urandom(32)])  # any get lets go of what was asked back
        return client.stats()["pinned_client_bytes"] <= 300 << 10

    eventually(over, "what is more is lost")
    with pytest.raises(BlockLost):
        first[0].layer(0)
    del late


def test_a_device_is_told_and_forgotten(kvstored, capsys):
    client = kvstored.connect()
    assert client.give_to_device()
    assert status(kvstored, capsys, "--sessions")["sessions"][0]["device"]
    kvstored.restart()
    client.lookup([os.urandom(32)])
    client.touch([os.urandom(32)])
    assert status(kvstored, capsys, "--sessions")["sessions"][0]["device"], "the next daemon knows it"
    assert client.give_to_device(False)
    assert not status(kvstored, capsys, "--sessions")["sessions"][0]["device"]


def test_a_region_counts_as_memory_that_a_device_may_write(kvstored, capsys):
    def told() -> bool:
        return status(kvstored, capsys, "--sessions")["sessions"][0]["device"]

    client = kvstored.connect()
    first, second = client.register_region(64 << 10), client.register_region(64 << 10)
    assert told()
    first.close()
    assert told(), "the other is open still"
    second.close()
    assert not told()
    assert client.give_to_device()
    client.register_region(64 << 10).close()
    assert told(), "the client said so, and has not taken it back"
