"""The HTTP server: its routes, its errors, its bounds.

Owns the translation between HTTP and asking/answers. Never computes and never logs what was asked. Invariant:
every error has OpenAI's shape (under /v1/messages Anthropic's), an unknown field is one that names it, and a
client that hangs up costs at most the step under way.
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvclient.serve.errors import ANTHROPIC, ApiError, unsupported
from kvclient.serve.http.answers import chat, completions, messages, responses
from kvclient.serve.http.answers.run import Run, as_events
from kvclient.serve.http.asking import Ask, Asking
from kvclient.serve.http.decisions import DecisionRequest, decision_whole, decisions
from kvclient.serve.http.figures import prometheus
from kvclient.serve.http.messages import Counted, MessagesRequest
from kvclient.serve.http.responses import ResponsesRequest
from kvclient.serve.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    WarmRequest,
)

PAGE = Path(__file__).with_name("page.html")
MOST_BODY_BYTES = 8 << 20
FIELD = re.compile(r"(?!(body|str)$)[a-z_][a-z0-9_]*")  # of a place of pydantic's, which names kinds too
MOST_LONG, RETRY_AFTER_S = 64, 1  # long texts that wait to be read
SHORT_BODY_BYTES = 64 << 10  # what is longer takes its time to be read as tokens, beside the others


def create_app(asking: Asking, version: str = "", origins: Sequence[str] = ()) -> FastAPI:
    """The routes over what answers them. origins: of pages elsewhere whose scripts may ask, as
    https://chat.example; none: only the page here.
    """
    reading = Reading(asking)
    app = FastAPI(title="kvclient-serve", version=version, docs_url=None, redoc_url=None,
                  lifespan=reading.lifespan)  # fmt: skip
    _errors(app)
    app.add_middleware(Bounded)
    if origins:
        told = ["X-KV-Reused-Tokens", "X-KV-Tier", "X-KV-TTFT", "X-Request-Id", "Retry-After"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
                           allow_headers=["*"], expose_headers=told)  # fmt: skip

    async def salt(request: Request) -> bytes:  # one that is not is called on a thread
        shown = (request.headers.get(name) for name in ("authorization", "x-api-key"))
        return asking.salt_of(*(text and text.encode("latin-1") for text in shown))  # bytes, as they came

    Salt = Annotated[bytes, Depends(salt)]
    _figures(app, asking, Salt, version)
    _answers(app, asking, Salt, reading)
    _tokens(app, asking, Salt, reading)
    _ahead(app, asking, Salt, reading)
    return app


class Reading:
    """What is asked as tokens: a long text on a thread of its own, one after the other, so that others are
    answered meanwhile; so are the schemas that answers keep to. At the app's end, and where its client has
    hung up, none that waits is read. Raises what Asking does, and ApiError: 429 where too many wait, 499
    where nobody does."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._apart: Asking | None = None  # made for the first long text: its tokenizer takes memory
        self._thread, self._waiting = ThreadPoolExecutor(1, "kvclient-serve-read"), 0
        self._turn = asyncio.Lock()  # so that what waits can be left out: what the thread has it reads

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Of the app that reads: behind it nothing is read."""
        try:
            yield
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, request: Request, read: Callable[[Asking], Any]) -> Any:
        if int(request.headers["content-length"]) <= SHORT_BODY_BYTES:
            return read(self._asking)
        if self._apart is None:
            self._apart = self._asking.apart()
        return await self._on_thread(request, read, self._apart)

    async def enforced(self, request: Request, asks: list[Ask]) -> list[Ask]:
        """The same, with what keeps their answers to a schema."""
        if not any(ask.kept for ask in asks):
            return asks
        return list(await self._on_thread(request, self._asking.enforced, asks))

    async def _on_thread(self, request: Request, read: Callable[[Any], Any], of: Any) -> Any:
        if self._waiting >= MOST_LONG:
            text = f"{MOST_LONG} long texts or schemas wait to be read already"
            raise ApiError(429, text, "rate_limit_error", "queue_full", None, RETRY_AFTER_S)
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise ApiError(499, "the client is gone")
                return await asyncio.get_running_loop().run_in_executor(self._thread, read, of)
        finally:
            self._waiting -= 1


class Shared:
    """What a store is asked, on a thread: one that stands still keeps nobody waiting but who asks that, and
    who asks meanwhile hears the same.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[Any] | None = None

    async def __call__(self) -> Any:
        if self._asked is None:
            self._asked = asyncio.create_task(asyncio.to_thread(self._ask))
            self._asked.add_done_callback(self._heard)
        return await asyncio.shield(self._asked)

    def _heard(self, _: Any) -> None:
        self._asked = None


def _figures(app: FastAPI, asking: Asking, Salt: Any, version: str) -> None:
    """The page, the model and what it did."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        policy = (
            "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
            "base-uri 'none'"
        )
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health() -> Response:
        ready = asking.loop.ready.is_set()
        told = {"model": asking.model_name, "store": asking.store}
        return JSONResponse({"status": "ready" if ready else "starting", **told}, 200 if ready else 503)

    @app.get("/version")
    async def version_of() -> dict[str, str]:
        return {"version": version}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(prometheus(asking.loop.stats()), media_type="text/plain; version=0.0.4")

    of_store = Shared(asking.store_stats)

    @app.get("/v1/stats")
    async def stats(_: Salt) -> dict[str, Any]:
        return {**asking.loop.stats(), "store": await of_store()}

    @app.get("/v1/models")
    async def models(_: Salt) -> dict[str, Any]:
        return {"object": "list", "data": [asking.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, _: Salt) -> dict[str, Any]:
        asking.check_model(name)
        return asking.card


def _answers(app: FastAPI, asking: Asking, Salt: Any, reading: Reading) -> None:
    """What computes an answer."""

    def add(path: str, Asked: Any, asks: Callable[[Asking, Any], list[Ask]], whole: Any, chunks: Any) -> None:
        @app.post(f"/v1/{path}")
        async def _(asked: Asked, request: Request, salt: Salt) -> Response:
            wanted = await reading(request, lambda by: asks(by, asked))
            wanted = await reading.enforced(request, wanted)
            return await _answer(asking, wanted, asked.stream, request, salt, whole, chunks)

    add("chat/completions", ChatRequest, Asking.chat, chat.chat_whole, chat.chat_stream)
    texts = completions.completion_whole, completions.completion_stream
    add("completions", CompletionRequest, Asking.completion, *texts)
    add("responses", ResponsesRequest, Asking.responses, responses.response_whole, responses.response_stream)
    add("messages", MessagesRequest, Asking.messages, messages.message_whole, messages.message_stream)

    @app.post("/v1/messages/count_tokens")
    async def _(asked: Counted, request: Request, _: Salt) -> dict[str, int]:
        return {"input_tokens": await reading(request, lambda by: by.count(asked))}

    @app.post("/v1/systemone")
    async def _(asked: DecisionRequest, request: Request, salt: Salt) -> Response:
        def whole(run: Run) -> dict[str, Any]:
            return decision_whole(run, asked)

        wanted = await reading(request, lambda by: decisions(by, asked))
        return await _answer(asking, wanted, False, request, salt, whole, None)


def _tokens(app: FastAPI, asking: Asking, Salt: Any, reading: Reading) -> None:
    """What is asked beside answers."""

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise unsupported("/v1/embeddings", "this server generates text")

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, request: Request, _: Salt) -> dict[str, Any]:
        asking.check_model(asked.model)
        ids = await reading(request, lambda by: by.tokenized(asked))
        return {"tokens": ids, "count": len(ids), "max_model_len": asking.max_tokens}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request, _: Salt) -> dict[str, Any]:
        asking.check_model(asked.model)
        return {"prompt": await reading(request, lambda by: by.tokenizer.decode(by.tokens(asked.tokens)))}

    @app.post("/v1/warm")
    async def warm(asked: WarmRequest, request: Request, salt: Salt) -> Response:
        """Computes a prompt ahead, so that its KV is there: one token is computed and thrown away."""
        asking.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "either prompt or messages is needed", param="prompt")

        def read(by: Asking) -> list[int]:
            if asked.prompt is not None:
                return by.tokens(asked.prompt)
            return by.chat_tokens(asked.messages or [])

        prompt = await reading(request, read)
        made = CompletionRequest(prompt=prompt, max_tokens=1, temperature=0, cache=asked.cache)
        return await _answer(asking, asking.completion(made), False, request, salt, Run.reuse, None)


def _ahead(app: FastAPI, asking: Asking, Salt: Any, reading: Reading) -> None:
    """For a router, before a server answers: what of a request's prompt is in the store, without computing
    (/v1/held); and its prompt computed, with nothing said (/v1/prefill).
    """

    def add(path: str, Asked: Any, asks: Callable[[Asking, Any], list[Ask]]) -> None:
        @app.post(f"/v1/held/{path}")
        async def _(asked: Asked, request: Request, salt: Salt) -> dict[str, int]:
            ask = (await reading(request, lambda by: asks(by, asked)))[0]
            return await asyncio.to_thread(asking.held, ask, salt)

        @app.post(f"/v1/prefill/{path}")
        async def _(asked: Asked, request: Request, salt: Salt) -> Response:
            (ask, *_rest) = await reading(request, lambda by: asks(by, asked))
            made = CompletionRequest(prompt=ask.prompt, max_tokens=1, temperature=0, cache=ask.request.cache,
                                     kv_codec=ask.request.kv_codec)  # fmt: skip
            return await _answer(asking, asking.completion(made), False, request, salt, Run.reuse, None)

    add("chat/completions", ChatRequest, Asking.chat)
    add("completions", CompletionRequest, Asking.completion)
    add("responses", ResponsesRequest, Asking.responses)
    add("messages", MessagesRequest, Asking.messages)
    add("systemone", DecisionRequest, decisions)


async def _answer(
    asking: Asking, asks: list[Ask], stream: bool, request: Request, salt: bytes,
    whole: Callable[[Run], dict[str, Any]],
    chunks: Callable[[Run], AsyncIterator[dict[str, Any]]] | None,
) -> Response:  # fmt: skip
    asking.check_answers(asks)
    run = Run(asking, asks, salt)
    if stream and chunks is not None:
        return Streamed(run, as_events(chunks(run), run, request.url.path))
    await run.whole(gone(request))
    reuse = run.reuse()
    headers = {
        "X-KV-Reused-Tokens": str(reuse.get("reused_tokens", 0)),
        "X-KV-Tier": reuse.get("tier", "none"),
        "X-KV-TTFT": str(reuse.get("ttft_s") or ""),
    }
    return JSONResponse(whole(run), headers=headers)


async def gone(request: Request) -> None:
    """Until its client is. Of a request whose body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Streamed(StreamingResponse):
    """An answer whose run is closed with it: where a client leaves while a piece waits to be sent, what makes
    the pieces is closed when Python happens to collect it, and all of it would be computed for nobody.
    """

    def __init__(self, run: Run, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._run = run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.close()


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return _shown(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: RequestValidationError | ValidationError) -> JSONResponse:
        # Of a field that may be of several kinds, what is wrong deepest inside is what was meant.
        first = max(error.errors(), key=lambda met: len(met["loc"]))
        place = ".".join(str(part) for part in first["loc"] if FIELD.fullmatch(str(part)))
        kind = request.headers.get("content-type", "")
        if not place and "json" not in kind:
            told = f"a body of Content-Type application/json is wanted, not {kind or 'one that says none'}"
            return _shown(ApiError(400, told), request.url.path)
        if first["type"] == "extra_forbidden":
            return _shown(unsupported(place), request.url.path)
        value = first.get("input")
        shown = f", not {value!r:.40}" if isinstance(value, int | float) else ""  # of a text nothing is told
        told = ApiError(400, f"{place or 'body'}: {first['msg']}{shown}", param=place or None)
        return _shown(told, request.url.path)

    @app.exception_handler(UnicodeEncodeError)
    async def no_text(request: Request, error: UnicodeEncodeError) -> JSONResponse:
        told = ApiError(400, f"half a surrogate pair at character {error.start} of a text")
        return _shown(told, request.url.path)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        told = ApiError(500, f"the server failed: {type(error).__name__}", "server_error")
        return _shown(told, request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        return _shown(ApiError(error.status_code, f"{request.method} {path}: {error.detail}"), path)


class Bounded:
    """Bodies have a length and a limit, answers a number. Not Starlette's own kind of middleware: behind that
    one a handler never hears that its client is gone.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        wanted_id, length = headers.get("x-request-id", ""), headers.get("content-length", "")
        usable = wanted_id.isascii() and wanted_id.isprintable() and 0 < len(wanted_id) <= 128
        ident, began = wanted_id if usable else uuid.uuid4().hex, time.perf_counter()

        async def numbered(message: Any) -> None:
            if message["type"] == "http.response.start":
                took = str(int(1000 * (time.perf_counter() - began)))
                added = [(b"x-request-id", ident.encode()), (b"openai-processing-ms", took.encode())]
                if scope["path"].startswith(ANTHROPIC):
                    added.append((b"request-id", ident.encode()))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        # Beside a Transfer-Encoding a length says nothing: the body would be as long as it is.
        if scope["method"] == "POST" and ("transfer-encoding" in headers or not length.isdigit()):
            told = _shown(ApiError(411, "Content-Length is needed, and it alone"), scope["path"])
            return await told(scope, receive, numbered)
        if scope["method"] == "POST" and int(length) > MOST_BODY_BYTES:
            text = f"a body of {length} bytes; the limit is {MOST_BODY_BYTES}"
            return await _shown(ApiError(413, text), scope["path"])(scope, receive, numbered)
        return await self._app(scope, receive, numbered)


def _shown(error: ApiError, path: str) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    return JSONResponse(error.body_at(path), error.status, headers=headers)
