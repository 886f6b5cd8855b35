"""The server on this machine: bound to 127.0.0.1, so that nobody else can reach it.

uvicorn waits without end for the first request of a connection. Here such a connection is closed, and so is a new one
where there are too many.
"""

import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lengthwise.serve.app import SECONDS, make_app
from lengthwise.serve.catalog import Catalog
from lengthwise.serve.session import LIMIT, Session

ADDRESS = "127.0.0.1"
CONNECTIONS = 512


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
