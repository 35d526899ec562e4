"""The router's HTTP: what comes in, who is asked, what goes back.

Owns the passing on. Never reads an answer and never logs what was asked. Invariants: a request gets exactly
one answer; it is asked of another server only while nothing of an answer has gone back; when its client
leaves, the server that computes it hears that at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import h11

from kvclient.serve.errors import ApiError
from kvclient.serve.route.asked import body_of, gone, header, model_of, parsed, passed_headers
from kvclient.serve.route.back import NOT_RETURNED, Back, Events, streams
from kvclient.serve.route.balance import LEAST_PIECES, Load, choose
from kvclient.serve.route.exchange import Exchange, ServerLost
from kvclient.serve.route.prefill import prefill, prefiller, worth
from kvclient.serve.route.prefixes import Prefixes, pieces_of
from kvclient.serve.route.servers import Probing, Server

ANSWERED = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/systemone", "/v1/warm",
}  # fmt: skip
MOST_ANSWER_BYTES = 256 << 20  # of one that is held until it is whole
HELD_TIMEOUT_S = 0.5
RETRY_AFTER_S = 2
BUSY = (429, 503)


class Router:
    """An ASGI application. imbalance: requests that one server may have more under way than another before a
    prefix that it holds no longer counts.
    """

    def __init__(
        self, servers: Sequence[Server], imbalance: int, most: int, probing: Probing, prefill_bytes: int = 0
    ) -> None:
        self.servers, self._imbalance, self._most, self._probing = list(servers), imbalance, most, probing
        self._prefill_bytes = prefill_bytes
        self.prefixes, self.counts = Prefixes(), Counter[str]()
        self._watches: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._life(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1003})
        back = Back(send, header(scope, b"x-request-id"), scope["path"])
        try:
            await self._request(scope, receive, back)
        except ApiError as error:
            await back.error(error)
        return None

    async def _life(self, receive: Any, send: Any) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.startup":
                watches = (server.watch(self._probing, self._changed) for server in self.servers)
                self._watches = [asyncio.create_task(watch) for watch in watches]
            else:
                for task in self._watches:
                    task.cancel()
                for server in self.servers:
                    server.lose()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    def _changed(self, server: Server, store: str) -> None:
        """What nobody who is there reads is not there."""
        read = {server.load.store for server in self.servers if server.up}
        for name in {store, server.load.store} - read:
            self.prefixes.forget(name)

    # ---------------------------------------------------------------- one request

    async def _request(self, scope: Any, receive: Any, back: Back) -> None:
        path, method = scope["path"], scope["method"]
        if method == "GET" and path == "/health":
            up = any(server.up for server in self.servers)
            told = {"status": "ready" if up else "starting", "servers": self._told()}
            return await back.json(200 if up else 503, told)
        if method == "GET" and path == "/metrics":
            return await back.text(self._metrics())
        body = await body_of(scope, receive)
        if body is None:
            return None
        passing = asyncio.create_task(self._pass_on(scope, body, back))
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                self.counts["cancelled_total"] += 1
                passing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await passing
        finally:
            passing.cancel()
            leaving.cancel()
        return None

    async def _pass_on(self, scope: Any, body: bytes, back: Back) -> None:
        path = scope["path"]
        if scope["method"] == "GET" and path == "/v1/models":
            return await self._models(scope, back)
        asked = parsed(body)
        if sum(server.load.under_way for server in self.servers) >= self._most:
            text = f"{self._most} requests are under way already"
            raise ApiError(429, text, "rate_limit_error", "queue_full", None, RETRY_AFTER_S)
        who = header(scope, b"authorization") or header(scope, b"x-api-key")
        pieces = pieces_of(asked, who) if asked and path in ANSWERED else []
        named = model_of(path, asked)
        tried: set[str] = set()
        while True:
            able = self._able(named, tried)
            matched = await self._matched(able, pieces, scope, body) if pieces else {}
            load = choose([server.load for server in able if server.up], matched, self._imbalance)
            if load is None:
                return await self._nobody(back, named, tried)
            server = next(server for server in able if server.load is load)
            tried.add(load.name)
            if pieces:
                self.counts["known_prefix_total"] += matched.get(load.store, 0) >= LEAST_PIECES
                if len(tried) == 1:
                    await self._prefill(load, named, pieces, matched, scope, body)
                self.prefixes.note(pieces, load.store)
            if await self._ask(server, scope, body, back, last=not self._able(named, tried)):
                return None
            self.counts["asked_again_total"] += 1

    def _able(self, model: str | None, tried: set[str]) -> list[Server]:
        up = [server for server in self.servers if server.up]
        # Also of those that are away. None: not known yet, of one that may still come.
        known = {s.model for s in self.servers if s.model or s.missed < self._probing.misses}
        if model is not None and up and not known & {model, None}:
            there = ", ".join(sorted(map(str, known)))
            text = f"the model {model!r:.100} does not exist; these servers have {there}"
            raise ApiError(404, text, code="model_not_found", param="model")
        able = [server for server in up if server.load.name not in tried and model in (None, server.model)]
        return [server for server in able if not server.prefills] or able

    async def _prefill(
        self, load: Load, model: str | None, pieces: list[bytes], matched: Counter[str], scope: Any,
        body: bytes,
    ) -> None:  # fmt: skip
        """Has the prompt computed elsewhere, where there is such a server and so much of it is missing."""
        path, held = scope["raw_path"], matched.get(load.store, 0)
        if not worth(path, len(pieces), held, self._prefill_bytes):
            return
        there = [
            server
            for server in self.servers
            if server.up and server.prefills and model in (None, server.model)
        ]
        server = prefiller([candidate for candidate in there if candidate.load is not load], load)
        if server is None:
            return
        done = await prefill(server, path, passed_headers(scope), body)
        self.counts["prefilled_total" if done else "prefill_lost_total"] += 1
        if done:
            self.prefixes.note(pieces, server.load.store)

    async def _nobody(self, back: Back, model: str | None, tried: set[str]) -> None:
        if back.busy is not None:
            return await back.give_busy()
        text = f"no server is there{f' for {model!r:.100}' if model else ''}; {len(tried)} were asked"
        raise ApiError(503, text, "server_error", "no_server", None, RETRY_AFTER_S)

    async def _matched(
        self, able: Sequence[Server], pieces: Sequence[bytes], scope: Any, body: bytes
    ) -> Counter[str]:
        """By what was sent where; of a beginning that was never seen here, by asking one server a store."""
        matched = self.prefixes.matched(pieces)
        stores = {server.load.store: server for server in able}
        if matched or len(stores) < 2 or len(pieces) < LEAST_PIECES or scope["path"] == "/v1/warm":
            return matched
        self.counts["asked_what_is_held_total"] += 1
        told = await asyncio.gather(*(_held(store, scope, body) for store in stores.values()))
        for store, share in zip(stores, told, strict=True):
            if count := math.ceil(share * len(pieces)):
                matched[store] = count
                self.prefixes.note(pieces[:count], store)
        return matched

    async def _ask(self, server: Server, scope: Any, body: bytes, back: Back, last: bool) -> bool:
        """Whether something went back. False: ask another."""
        server.load.under_way += 1
        server.load.asked += 1
        try:
            for fresh in (False, True):  # a connection that lay idle may have been closed a moment ago
                exchange = await server.connection(fresh)
                idle = exchange.used > 0
                try:
                    return await _passed(exchange, server, scope, body, back, last)
                except ServerLost:
                    if fresh or not idle or back.begun:
                        raise
                finally:
                    server.done(exchange)
        except ServerLost as error:
            self.counts["lost_total"] += 1
            if back.begun:
                await back.broken(f"the server went away in the middle of its answer: {error}")
                return True
        finally:
            server.load.under_way -= 1
        return False

    # ---------------------------------------------------------------- its own answers

    async def _models(self, scope: Any, back: Back) -> None:
        """Those of all servers; a key that one refuses is refused."""
        models: dict[str, Any] = {}
        for server in [server for server in self.servers if server.up]:
            with contextlib.suppress(ServerLost, TimeoutError, ValueError):
                status, body = await server.small(b"GET", b"/v1/models", passed_headers(scope), b"", 5.0)
                if status != 200:
                    return await back.raw(status, [(b"content-type", b"application/json")], body)
                models |= {model_card["id"]: model_card for model_card in json.loads(body)["data"]}
        return await back.json(200, {"object": "list", "data": list(models.values())})

    def _told(self) -> list[dict[str, Any]]:
        return [
            {"url": server.url, "up": server.up, "prefills": server.prefills, "model": server.model,
             "under_way": server.load.under_way, "asked": server.load.asked, "lost": server.lost_total}
            for server in self.servers
        ]  # fmt: skip

    def _metrics(self) -> str:
        lines = []
        for name, value in self.counts.items():
            lines += [f"# TYPE kvclient_route_{name} counter", f"kvclient_route_{name} {value}"]
        kinds = {"up": "gauge", "under_way": "gauge", "asked_total": "counter", "lost_total": "counter"}
        for name, kind in kinds.items():
            lines.append(f"# TYPE kvclient_route_server_{name} {kind}")
            for server in self.servers:
                values = (int(server.up), server.load.under_way, server.load.asked, server.lost_total)
                value = dict(zip(kinds, values, strict=True))[name]
                lines.append(f'kvclient_route_server_{name}{{server="{server.load.name}"}} {value}')
        return "\n".join(lines) + "\n"


async def _passed(
    exchange: Exchange, server: Server, scope: Any, body: bytes, back: Back, last: bool
) -> bool:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    head = await exchange.ask(scope["method"].encode(), target, passed_headers(scope), body)
    headers = [(n, v) for n, v in head.headers if n not in NOT_RETURNED]
    headers.append((b"x-kv-server", server.load.name.encode()))
    if any(name == b"content-length" for name, _ in headers):
        whole = await _whole(exchange, head)
        if head.status_code in BUSY and not last:
            back.busy = (head.status_code, headers, whole)
            return False
        await back.raw(head.status_code, headers, whole)
        return True
    cut = Events() if streams(headers) else None
    async for data in exchange.data():  # until the first event is there, another server can be asked
        if part := data if cut is None else cut.add(data):
            if not back.begun:
                await back.begin(head.status_code, headers)
            await back.more(part)
    if not back.begun:
        await back.begin(head.status_code, headers)
    await back.more(b"" if cut is None else cut.held, False)
    return True


async def _whole(exchange: Exchange, head: h11.Response) -> bytes:
    parts, length = [], 0
    async for data in exchange.data():
        parts.append(data)
        length += len(data)
        if length > MOST_ANSWER_BYTES:
            raise ServerLost(f"an answer of more than {MOST_ANSWER_BYTES} bytes ({head.status_code})")
    return b"".join(parts)


async def _held(server: Server, scope: Any, body: bytes) -> float:
    """The share of a prompt that its store holds; 0 where it does not say in time."""
    target = scope["raw_path"].replace(b"/v1/", b"/v1/held/", 1)
    try:
        status, told = await server.small(b"POST", target, passed_headers(scope), body, HELD_TIMEOUT_S)
        said = json.loads(told) if status == 200 else {}
        return min(1.0, said["held_tokens"] / said["prompt_tokens"]) if said else 0.0
    except (ServerLost, TimeoutError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0
