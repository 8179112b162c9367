"""uvicorn's HTTP/1.1 protocol with a bound on how long a client may take to send the head of a request."""

from __future__ import annotations

import asyncio
from typing import Final, final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

__all__ = ["HEAD_S", "BoundedH11"]

HEAD_S: Final = 10.0
"how long a client may take to send the head of a request"


@final
class BoundedH11(H11Protocol):
    """Closes a connection that has begun a request, or none yet, and does not get to the end of a head in time."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """More of a request came."""
        super().data_received(data)
        cycle: RequestResponseCycle | None = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if self._head is not None and answering:
            self._head.cancel()
            self._head = None
        elif self._head is None and not answering:
            self._head = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _too_slow(self) -> None:
        self._head = None
        self.transport.close()
