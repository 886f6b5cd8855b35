"""The answers of the server: the page, what there is to choose, a look at a model, and single cells."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lengthwise.serve.limits import TooLargeError, read_body
from lengthwise.serve.looks import Looks
from lengthwise.views.maps import What
from lengthwise.views.page.document import document, policy

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""Names by which this machine calls itself; a page of another name that leads here is turned away."""

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(looks: Looks) -> Starlette:
    """The application."""

    async def page(_: Request) -> Response:
        return HTMLResponse(document({"title": "Lengthwise", "models": []}, title="Lengthwise", live=True))

    async def choices(_: Request) -> Response:
        library = looks.library
        found = await run_in_threadpool(lambda: {"groups": library.groups(), "tables": library.tables()})
        return JSONResponse({**found, "limit": looks.limit})

    async def look(request: Request) -> Response:
        wanted = parse_look(request.headers.get("content-type", ""), await read_body(request))
        return JSONResponse(await run_in_threadpool(lambda: looks.look(**wanted)))

    async def cells(request: Request) -> Response:
        asked = request.query_params
        what: Any = asked.get("what", "")
        if what not in get_args(What):
            raise ValueError(f"what must be a view; {what!r} came. See the page.")
        layer, head, i, j, rows, columns = (
            _whole(asked, name) for name in ("layer", "head", "i", "j", "rows", "columns")
        )
        key = asked.get("look", "")
        part = await run_in_threadpool(
            lambda: looks.cells(key, what, layer, head, slice(i, i + rows), slice(j, j + columns))
        )
        return Response(part, media_type="application/octet-stream")

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/api/choices", answering(choices), methods=["GET"]),
            Route("/api/look", answering(look), methods=["POST"]),
            Route("/api/cells", answering(cells), methods=["GET"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS), Middleware(Guarded)],
        exception_handlers={HTTPException: _plain_error},
    )


def parse_look(kind: str, body: bytes) -> dict[str, Any]:
    """What was asked to be looked at, checked."""
    # Only a script of our own page may send this type: a form on another page cannot.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ValueError(f"a look is asked for in application/json; {kind or 'nothing'} came. Use the page.")
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("a look is asked for in JSON; what came is none. Use the page.") from None
    text = said.get("text") if isinstance(said, dict) else None
    length = said.get("length") if isinstance(said, dict) else None
    if (
        not isinstance(said, dict)
        or not isinstance(said.get("model"), str)
        or said.get("layer") not in ("all", "last")
        or not (text is None or isinstance(text, str))
        or not (length is None or (isinstance(length, int) and not isinstance(length, bool)))
    ):
        raise ValueError(
            "a look needs a model, layer 'all' or 'last', and a text or a length; other came. Use the page."
        )
    if text is not None and not text.strip():
        raise ValueError("a text must have a word at least; an empty one came. Write one, or take held-out text.")
    return {"name": said["model"], "layer": said["layer"], "text": text, "length": length}


def answering(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose errors are answers in words, without a trace of what is inside."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TooLargeError as fault:
            # What is still on its way is not read, so the connection cannot go on.
            return JSONResponse({"error": str(fault)}, 413, {"Connection": "close"})
        except LookupError as fault:
            return JSONResponse({"error": str(fault.args[0]) if fault.args else "not found"}, 404)
        except TimeoutError:
            return JSONResponse({"error": "the request did not come in time. Send it again."}, 408)
        except (ValueError, TypeError, NotImplementedError) as fault:
            return JSONResponse({"error": str(fault)}, 400)
        except OSError:
            return JSONResponse(
                {"error": "the model cannot be read any more. Choose another, or look at its run."}, 404
            )
        except ClientDisconnect:
            return Response(status_code=400)

    return answer


class Guarded:
    """Adds to every answer what a browser may do with it."""

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

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        await self.app(scope, receive, guarded if scope["type"] == "http" else send)


def _whole(asked: Any, name: str) -> int:
    said = asked.get(name, "")
    if not said.isascii() or not said.isdigit() or len(said) > 9:
        raise ValueError(f"{name} must be a whole number; {said[:20]!r} came. Use the page.")
    return int(said)


async def _plain_error(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    return JSONResponse({"error": fault.detail}, fault.status_code, fault.headers)
