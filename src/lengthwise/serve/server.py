"""The server on this machine: bound to 127.0.0.1, so that nobody else can reach it."""

import socket
from collections.abc import Sequence

import uvicorn

from lengthwise.serve.app import make_app
from lengthwise.serve.library import Library
from lengthwise.serve.limits import SECONDS, PatientProtocol
from lengthwise.serve.looks import LIMIT, Looks

ADDRESS = "127.0.0.1"


def serve(sources: Sequence[str] = (), *, port: int = 8710, max_tokens: int = LIMIT) -> str:
    """Serve until it is interrupted."""
    looks = Looks(Library(sources), limit=max_tokens)
    bound = bind(port)
    print(f"Lengthwise is at http://{ADDRESS}:{bound.getsockname()[1]}/ and ends with Ctrl-C.", flush=True)
    make_server(looks).run(sockets=[bound])
    return "Ended."


def bind(port: int) -> socket.socket:
    """A socket of our own at a port, 0 for any that is free; or an error."""
    if not 0 <= port <= 65535:
        raise ValueError(f"a port must be from 0 to 65535; {port} came. Leave it out.")
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((ADDRESS, port))
        bound.listen()
    except OSError as fault:
        bound.close()
        raise OSError(
            f"port {port} must be free; it is not ({fault.strerror}). Give --port another number, or 0 for any."
        ) from None
    return bound


def make_server(looks: Looks) -> uvicorn.Server:
    """The server, not yet started."""
    config = uvicorn.Config(
        make_app(looks),
        http=PatientProtocol,
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
