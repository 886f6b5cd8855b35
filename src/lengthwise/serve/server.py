"""The server on this machine, bound to 127.0.0.1, so that nobody else can reach it; and its answers.

It answers with the page, the models to choose from, a look at a model, and single cells. A look is answered by lines of
JSON: {"done": 3, "layers": 12} as layers are finished, then {"model": ...} for the page or {"error": ...}. It ends when
the browser closes the connection.

uvicorn waits without end for the first request of a connection. Here such a connection is closed, and so is a new one
where there are too many.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, get_args

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lengthwise.errors import UserError
from lengthwise.serve.catalog import Catalog
from lengthwise.serve.session import LIMIT, LookCancelledError, Progress, Session
from lengthwise.views import Quantity
from lengthwise.views.page import document, policy

ADDRESS = "127.0.0.1"
CONNECTIONS = 512
HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""Names of this machine; a request under another name, such as a page elsewhere that leads here, is refused."""
BODY, SECONDS = 2**20, 10.0
"""How many bytes a request has at most, and how long it takes to arrive."""
POLL = 0.1
"""Seconds between two looks at the progress of a computation."""
Endpoint = Callable[[Request], Awaitable[Response]]


def serve(sources: Sequence[str] = (), *, port: int = 8710, max_tokens: int = LIMIT) -> str:
    """Serve until it is interrupted."""
    session = Session(Catalog(sources), limit=max_tokens)
    bound = bind(port)
    print(f"Lengthwise is at http://{ADDRESS}:{bound.getsockname()[1]}/; end it with Ctrl-C.", flush=True)
    make_server(session).run(sockets=[bound])
    return "Ended."


def bind(port: int) -> socket.socket:
    """A listening socket at a port, 0 for any that is free; or an error."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((ADDRESS, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise OSError(
            f"port must be free, got {port}: {error.strerror}; give --port another number, or 0 for any"
        ) from None
    return bound


def make_server(session: Session) -> uvicorn.Server:
    """The server, not yet started."""
    config = uvicorn.Config(
        make_app(session),
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(SECONDS),
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=2**16,
    )
    return uvicorn.Server(config)


class LimitedProtocol(H11Protocol):
    """HTTP by h11, with a limit of connections and of the time until the first request."""

    def connection_made(self, transport: Any) -> None:
        """Close it if there are too many, or if it stays silent."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.close()
        self.loop.call_later(SECONDS, self._on_idle_timeout)

    def _on_idle_timeout(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class TooLargeError(ValueError):
    """More was sent than is accepted."""


def make_app(session: Session) -> Starlette:
    """The application."""

    async def page(_: Request) -> Response:
        return HTMLResponse(document({"title": "Lengthwise", "models": []}, title="Lengthwise", live=True))

    async def choices(_: Request) -> Response:
        catalog = session.catalog
        choices = await run_in_threadpool(lambda: {"groups": catalog.groups(), **catalog.cards()})
        return JSONResponse({**choices, "limit": session.limit})

    async def look(request: Request) -> Response:
        wanted = parse_look(request.headers.get("content-type", ""), await read_body(request))
        progress = Progress()
        task = asyncio.create_task(run_in_threadpool(lambda: session.look(**wanted, progress=progress)))
        # A look that nobody waits for any more ends with an error that nobody needs to see.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            # The answer begins with the first layer, so that an error before it has a status of its own.
            while not task.done() and not progress.layers:
                await _wait_for(task, request)
            if task.done():
                task.result()
        except BaseException:
            progress.cancel()
            raise
        return StreamingResponse(_progress_lines(task, progress, request), media_type="application/x-ndjson")

    async def cells(request: Request) -> Response:
        query = request.query_params
        quantity: Any = query.get("quantity", "")
        if quantity not in get_args(Quantity):
            raise ValueError(f"quantity must be one of {', '.join(get_args(Quantity))}, got {quantity[:20]!r}")
        layer, head, i, j, rows, columns = (
            _parse_int(query, name) for name in ("layer", "head", "i", "j", "rows", "columns")
        )
        part = await run_in_threadpool(
            lambda: session.cells(
                query.get("look", ""), quantity, layer, head, slice(i, i + rows), slice(j, j + columns)
            )
        )
        return Response(part, media_type="application/octet-stream")

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/api/choices", answering(choices), methods=["GET"]),
            Route("/api/look", answering(look), methods=["POST"]),
            Route("/api/cells", answering(cells), methods=["GET"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS), Middleware(SecurityHeaders)],
        exception_handlers={HTTPException: _http_error},
    )


async def _wait_for(task: "asyncio.Task[Any]", request: Request) -> None:
    """Wait a moment for a computation; an error if the browser does not wait any more."""
    await asyncio.wait({task}, timeout=POLL)
    if await request.is_disconnected():
        raise ClientDisconnect


async def _progress_lines(
    task: "asyncio.Task[dict[str, Any]]", progress: Progress, request: Request
) -> AsyncIterator[str]:
    done = -1
    try:
        while not task.done():
            if progress.done != done:
                done = progress.done
                yield _line({"done": done, "layers": progress.layers})
            await _wait_for(task, request)
        try:
            yield _line({"model": task.result()})
        except Exception as error:
            answer = error_answer(error)
            if answer is None:
                raise
            yield _line({"error": answer[0]})
    except ClientDisconnect:
        return
    finally:
        progress.cancel()


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def parse_look(content_type: str, body: bytes) -> dict[str, Any]:
    """The arguments of `Session.look`, checked."""
    # Only a script of our own page can send this type: a form on another page cannot.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ValueError(f"a look must be sent as application/json, got {content_type[:40] or 'no type'}")
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("a look must be sent as JSON, got something else") from None
    fields = wanted if isinstance(wanted, dict) else {}
    model, layer, text, length = (fields.get(name) for name in ("model", "layer", "text", "length"))
    if (
        not isinstance(model, str)
        or layer not in ("all", "last")
        or not (text is None or isinstance(text, str))
        or not (length is None or (isinstance(length, int) and not isinstance(length, bool)))
    ):
        raise ValueError("a look must have a model, layer 'all' or 'last', and a text or a length, got other fields")
    if text is not None and not text.strip():
        raise ValueError("the text must have at least one word, got none; write one, or choose held-out text")
    return {"name": model, "layer": layer, "text": text, "length": length}


async def read_body(request: Request) -> bytes:
    """The body of a request, if it is small and arrives in time."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > BODY:
        raise TooLargeError(f"a request must have at most {BODY:,} bytes, got {announced[:20]}")

    async def gather() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                raise TooLargeError(f"a request must have at most {BODY:,} bytes, got more")
        return bytes(body)

    return await asyncio.wait_for(gather(), SECONDS)


def answering(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose errors are answers in words, without a trace of what is inside."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            answered = error_answer(error)
            if answered is None:
                raise
            # After too large a body the rest of it is not read, so the connection cannot go on.
            headers = {"Connection": "close"} if isinstance(error, TooLargeError) else None
            return JSONResponse({"error": answered[0]}, answered[1], headers)

    return answer


def error_answer(error: Exception) -> tuple[str, int] | None:
    """What is answered to an error, and its status; None for errors of ours, which show nothing of themselves."""
    if isinstance(error, TooLargeError):
        return str(error), 413
    if isinstance(error, TimeoutError):
        return f"the request must arrive within {SECONDS:g} seconds", 408
    if isinstance(error, LookCancelledError):
        return str(error), 409
    if isinstance(error, LookupError):
        return str(error.args[0]) if error.args else "not found", 404
    if isinstance(error, UserError | ValueError | TypeError | NotImplementedError):
        return str(error), 400
    if isinstance(error, OSError):
        return "the model cannot be read any more; choose another, or check its run", 404
    return None


class SecurityHeaders:
    """Adds to every answer what a browser is allowed to do with it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.headers = [
            (name.encode(), value.encode())
            for name, value in {
                "content-security-policy": policy(live=True) + "; frame-ancestors 'none'",
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
                "cache-control": "no-store",
                "cross-origin-resource-policy": "same-origin",
            }.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _parse_int(query: Any, name: str) -> int:
    text = query.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"{name} must be an int, got {text[:20]!r}")
    return int(text)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
