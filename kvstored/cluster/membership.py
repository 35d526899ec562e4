"""Who belongs to the cluster, in etcd: a key for each host under a lease, and one for who runs the master.

Owns the lease. Talks to etcd's JSON gateway, so no client library is needed. Invariant: etcd that is away
changes nothing here: the last view stays, and what was ours is written again when it is back.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

NOT_ETCD = (ValueError, LookupError, TypeError, AttributeError)  # what reading others raises
LEASE_S = 15  # etcd may stand still for a second and more under load
CALL_S = 2.0
ROOT = "/kvstored"


# Where the environment names a proxy, it is not for etcd: a host's cluster is in its own network.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Away(Exception):
    """etcd does not answer."""


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _about(value: str) -> dict[str, Any] | None:
    """What a host tells of itself; None if somebody else wrote it, which is no host then."""
    try:
        about = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) else None


class Membership:
    def __init__(self, endpoints: str, cluster: str, node: str, about: Mapping[str, Any]) -> None:
        """`endpoints`: HOST:PORT, several joined by commas. `about`: what others are told of this host."""
        self._endpoints = endpoints.split(",")
        self._root = f"{ROOT}/{cluster}"
        self._node, self._about = node, dict(about)
        self._lease = ""
        self._written = False  # what others are told, under that lease
        self._looked_s = 0.0
        self.members: dict[str, dict[str, Any]] = {}
        self.away = ""  # why etcd does not answer, or ""

    def _call(self, what: str, said: Mapping[str, Any]) -> dict[str, Any]:
        why = ""
        for _ in range(len(self._endpoints)):
            request = urllib.request.Request(
                f"http://{self._endpoints[0]}/v3/{what}", json.dumps(said).encode()
            )
            try:
                with _DIRECT.open(request, timeout=CALL_S) as reply:
                    answer = json.loads(reply.read(1 << 22))
                if not isinstance(answer, dict):
                    raise ValueError("the answer is no object")
                return answer
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                why = f"{self._endpoints[0]}: {what}: {error}"
                self._endpoints.append(self._endpoints.pop(0))  # the next, and from now on
        raise Away(why)

    def look(self) -> bool:
        """Keeps the lease, brings the view up to date. False: etcd is away, and the last view stays."""
        try:
            self._keep()
            told = {name.rpartition("/")[2]: _about(value) for name, value in self._under("nodes").items()}
            self.members = {name: about for name, about in told.items() if about is not None}
            self.away = ""
            return True
        except (Away, *NOT_ETCD) as error:  # or it answers what etcd does not
            self.away = f"{type(error).__name__}: {error}" if not isinstance(error, Away) else str(error)
            return False

    def _keep(self) -> None:
        if self._lease:
            said = self._call("lease/keepalive", {"ID": self._lease})
            if int(said.get("result", {}).get("TTL", 0)) > 0:
                if not self._written:
                    self._tell_about()
                return
        self._lease = self._call("lease/grant", {"TTL": LEASE_S})["ID"]  # it ran out, or there was none
        self._tell_about()

    def tell(self, **about: Any) -> None:
        """What others are told of this host besides. Raises Away; it is told with the next look then."""
        self._about.update(about)
        self._tell_about()

    def _tell_about(self) -> None:
        self._written = False
        self._put(f"{self._root}/nodes/{self._node}", {**self._about, "since": time.time()})
        self._written = True

    def _put(self, key: str, value: Mapping[str, Any]) -> None:
        self._call("kv/put", {"key": _b64(key), "value": _b64(json.dumps(value)), "lease": self._lease})

    def _under(self, what: str) -> dict[str, str]:
        first = f"{self._root}/{what}/"
        last = first[:-1] + chr(ord(first[-1]) + 1)
        said = self._call("kv/range", {"key": _b64(first), "range_end": _b64(last)})
        return {
            base64.b64decode(kv["key"]).decode(errors="replace"): base64.b64decode(kv["value"]).decode(
                errors="replace"
            )
            for kv in said.get("kvs", ())
        }

    def master(self, address: str) -> str:
        """Where the master is: at `address` if nobody had it and this host took it. Raises Away."""
        key = _b64(f"{self._root}/master")
        self._call("kv/txn", {
            "compare": [{"key": key, "target": "CREATE", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": _b64(address), "lease": self._lease}}],
        })  # fmt: skip
        found = self._call("kv/range", {"key": key}).get("kvs", ())
        try:
            return base64.b64decode(found[0]["value"]).decode() if found else ""
        except NOT_ETCD as error:
            raise Away(f"kv/range: {type(error).__name__}: {error}") from error

    def depose(self, address: str) -> None:
        """The master at this address, if it is still said to be there: its part is free. Raises Away."""
        key = _b64(f"{self._root}/master")
        self._call("kv/txn", {
            "compare": [{"key": key, "target": "VALUE", "value": _b64(address)}],
            "success": [{"request_delete_range": {"key": key}}],
        })  # fmt: skip

    def leave(self) -> None:
        if self._lease:
            try:
                self._call("lease/revoke", {"ID": self._lease})
            except Away:
                pass
