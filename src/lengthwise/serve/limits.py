"""What keeps a server from being overrun: how long a connection may wait, how many there are, how much may be sent.

uvicorn waits without end for the first request of a connection. Here such a connection is closed, and so is a new one
where there are too many.
"""

import asyncio
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0
CONNECTIONS = 512
BODY = 2**20


class TooLargeError(ValueError):
    """More was sent than is taken."""


class PatientProtocol(H11Protocol):
    """HTTP by h11, for connections that say something within ten seconds."""

    def connection_made(self, transport: Any) -> None:
        """Begin to count."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.close()
        self.loop.call_later(SECONDS, self._hurry)

    def _hurry(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


async def read_body(request: Request) -> bytes:
    """What was sent, if it is small and comes in time."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > BODY:
        raise TooLargeError(f"a request may have {BODY:,} bytes; {declared} were announced. Send less.")

    async def gather() -> bytes:
        found = bytearray()
        async for chunk in request.stream():
            found += chunk
            if len(found) > BODY:
                raise TooLargeError(f"a request may have {BODY:,} bytes; more came. Send less.")
        return bytes(found)

    return await asyncio.wait_for(gather(), SECONDS)
