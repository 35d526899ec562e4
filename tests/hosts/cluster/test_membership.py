"""What etcd holds under a cluster's name anybody may have written: an odd entry is no host, the others are.

Method: etcd's JSON gateway in this process, with the answers that a test gives it. The real one is in
test_cluster.py.
"""

import base64
import http.server
import json
import socket
import threading
import urllib.request

import pytest

from kvstored.cluster.fabric import Fabric
from kvstored.cluster.membership import Away, Membership
from kvstored.cluster.mooncake import Unusable


def coded(what: bytes) -> str:
    return base64.b64encode(what).decode()


@pytest.fixture
def etcd():
    """(membership, answers): by call, what it is told."""
    answers = {"/v3/lease/grant": {"ID": "7"}, "/v3/kv/put": {}, "/v3/kv/range": {}}

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Membership(f"127.0.0.1:{server.server_port}", "c", "me", {}), answers
    server.shutdown()
    server.server_close()


def entries(**values: bytes) -> dict:
    return {
        "kvs": [
            {"key": coded(f"/kvstored/c/nodes/{name}".encode()), "value": coded(value)}
            for name, value in values.items()
        ]
    }


def test_an_entry_that_is_no_hosts_is_left_out(etcd):
    membership, answers = etcd
    answers["/v3/kv/range"] = entries(
        a=b'{"peer": "10.0.0.1:7400"}',
        text=b"hello",
        none=b"",
        listed=b"[1]",
        number=b"5",
        bytes=b"\xff\xfe{}",
    )
    assert membership.look() and membership.away == ""
    assert membership.members == {"a": {"peer": "10.0.0.1:7400"}}


@pytest.mark.parametrize(
    "answer", [[], None, {"kvs": None}, {"kvs": 5}, {"kvs": [{}]}, {"kvs": [{"key": 1, "value": 2}]}, "x"]
)
def test_an_answer_that_is_not_etcds_leaves_the_last_view(etcd, answer):
    membership, answers = etcd
    answers["/v3/kv/range"] = entries(a=b"{}")
    assert membership.look()
    answers["/v3/lease/keepalive"] = {"result": {"TTL": "15"}}
    answers["/v3/kv/range"] = answer
    assert not membership.look()
    assert membership.away and membership.members == {"a": {}}


def test_the_next_endpoint_is_asked_where_the_first_is_no_etcd(etcd):
    membership, answers = etcd
    answers["/v3/kv/range"] = entries(a=b"{}")
    good = membership._endpoints[0]
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=_says, args=(other, b"hello\r\n"), daemon=True).start()
        membership._endpoints = [f"127.0.0.1:{other.getsockname()[1]}", good]
        assert membership.look() and membership.members == {"a": {}}
        membership._endpoints = ["127.0.0.1:0"]
        assert not membership.look() and membership.away.startswith("127.0.0.1:0: lease/")


def _says(listener: socket.socket, what: bytes) -> None:
    accepted, _ = listener.accept()
    with accepted:
        accepted.recv(4096)
        accepted.sendall(what)


def test_a_proxy_of_the_environment_is_not_asked(etcd, monkeypatch):
    """Nor is it told the lease."""
    membership, answers = etcd
    answers["/v3/kv/range"] = entries(a=b"{}")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        at = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxy.close()
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, at)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # that of this process, made before
        assert membership.look(), membership.away


@pytest.mark.parametrize("also", [{}, {"segment": "s"}])
def test_what_could_not_be_told_is_told_with_the_next_look(etcd, also):
    """Not with the next lease: one that is kept alive never ends."""
    membership, answers = etcd
    answers["/v3/lease/keepalive"] = {"result": {"TTL": "15"}}
    if also:
        assert membership.look()
    answers["/v3/kv/put"] = []  # as from who is no etcd
    if also:
        with pytest.raises(Away):
            membership.tell(**also)
    else:
        assert not membership.look()
    answers["/v3/kv/put"] = {}
    told, put = [], membership._put
    membership._put = lambda key, value: told.append(value) or put(key, value)
    assert membership.look() and membership.look()
    assert [value.get("segment") for value in told] == [also.get("segment")]


@pytest.mark.parametrize("answer", [{"result": None}, {"result": 5}, []])
def test_a_lease_that_is_none_is_etcd_away(etcd, answer):
    membership, answers = etcd
    assert membership.look()
    answers["/v3/lease/keepalive"] = answer
    assert not membership.look() and membership.away


def test_a_master_that_has_no_address_is_etcd_away(etcd):
    membership, answers = etcd
    assert membership.look()
    answers["/v3/kv/txn"] = {}
    answers["/v3/kv/range"] = {"kvs": [{}]}
    with pytest.raises(Away):
        membership.master("127.0.0.1:1")


@pytest.fixture
def joined(etcd):
    """(a fabric that has joined the pool of another's master, what etcd answers)"""
    fabric = Fabric.__new__(Fabric)
    fabric.members, answers = etcd
    answers["/v3/lease/keepalive"] = {"result": {"TTL": "15"}}
    fabric._said, fabric._transport = {"node": "me", "address": "10.0.0.2", "master_port": 7401}, "tcp"
    fabric._master, fabric._runs, fabric._master_process = "10.0.0.1:7401", set(), None
    fabric.pool, fabric._tell_members, fabric._master_is_gone = object(), lambda: None, lambda: False
    fabric.members.master = lambda address: fabric._master  # its key is the same
    yield fabric, answers


def looks(fabric, answers, **members: bytes) -> None:
    answers["/v3/kv/range"] = entries(**members)
    fabric._look()
    assert fabric.members.away == ""


FIRST = b'{"serves": "10.0.0.1:7401", "run": "a"}'
AGAIN = b'{"serves": "10.0.0.1:7401", "run": "b"}'


def test_a_master_that_is_back_at_its_address_is_another(joined):
    """It is empty: who goes on with it believes what it put to be there."""
    looks(*joined, host=FIRST)
    looks(*joined, host=FIRST)
    with pytest.raises(Unusable, match="started anew"):
        looks(*joined, host=AGAIN)


ELSEWHERE = AGAIN.replace(b":7401", b":1")


@pytest.mark.parametrize("said", [None, b"{}", b'{"serves": "10.0.0.1:7401"}', ELSEWHERE])
def test_a_masters_host_that_etcd_lost_sight_of_is_the_same(joined, said):
    looks(*joined, host=FIRST)
    looks(*joined, **({} if said is None else {"host": said}))
    looks(*joined, host=FIRST)
    with pytest.raises(Unusable):
        looks(*joined, host=AGAIN)


def test_a_second_host_at_the_masters_address_changes_nothing(joined):
    looks(*joined, host=FIRST)
    looks(*joined, host=FIRST, other=AGAIN)
