"""The client's side of one request: what was asked, and a way to answer it piece by piece."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdhandoff_router.refusals import Refusal

__all__ = ["Client", "Exchange", "read_body", "traceparent_of"]

_SEND_S: Final = 30.0
"a client that takes nothing for this long has gone"
_BODY_S: Final = 30.0
_TRACE: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@final
class Client:
    """Answers one request.

    Attributes:
        begun: the status has been sent.
        headers: go with the answer, whatever it is.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.headers: dict[str, str] = {}

    async def start(self, status: int, content_type: str) -> None:
        """Begin an answer that comes in pieces."""
        self.begun = True
        head = {**self.headers, "content-type": content_type, "cache-control": "no-cache"}
        await self._give({"type": "http.response.start", "status": status, "headers": _raw(head)})

    async def write(self, data: bytes) -> None:
        """A piece of it."""
        if data:
            await self._give({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """Its end."""
        await self._give({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        """An answer in one piece: JSON."""
        self.begun = True
        data = msgspec.json.encode(body)
        head = {**self.headers, **(headers or {}), "content-type": "application/json", "content-length": str(len(data))}
        await self._give({"type": "http.response.start", "status": status, "headers": _raw(head)})
        await self._give({"type": "http.response.body", "body": data, "more_body": False})

    async def _give(self, message: dict[str, Any]) -> None:
        async with asyncio.timeout(_SEND_S):
            await self._send(message)


@final
class Exchange(Response):
    """An ASGI response that is worked out while the client listens, and stopped at any moment when it does not.

    Args:
        work: answers the client. It is cancelled when the client goes, and cleans up behind itself.
    """

    def __init__(self, work: Callable[[Client], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, and watch the client."""
        del scope
        work = asyncio.ensure_future(self._work(Client(send)))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        problem = None if work.cancelled() else work.exception()
        if problem is not None and not isinstance(problem, OSError | TimeoutError):  # those: the client takes nothing
            raise problem


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, most: int) -> dict[str, Any]:
    """A JSON object, in bounded size and time. Raises Refusal."""
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise Refusal(413, f"the body has more than {most} bytes", code="BODY_TOO_LARGE")
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {_BODY_S:.0f} s", code="BODY_TIMEOUT") from None
    except ClientDisconnect:
        raise Refusal(400, "the client left while it sent the body", code="DISCONNECTED") from None
    try:
        body = msgspec.json.decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="BAD_REQUEST") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object", code="BAD_REQUEST")
    return body


def traceparent_of(headers: Mapping[str, str]) -> str:
    """W3C trace context for what the router does: the client's trace, or one of its own, with a new span."""
    given = headers.get("traceparent", "")
    span = secrets.token_hex(8)
    if _TRACE.fullmatch(given):
        return f"{given[:36]}{span}{given[52:]}"
    return f"00-{secrets.token_hex(16)}-{span}-00"


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
