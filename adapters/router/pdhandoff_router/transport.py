"""HTTP to servers that the configuration names: the one place that knows which client library does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple, final

import httpx
import msgspec

from pdhandoff_router.refusals import Refusal

__all__ = ["Answer", "Events", "Transport", "read_json"]

MOST_ANSWER: Final = 64 << 20
"bytes of one answer"
_MOST_EVENT: Final = 16 << 20
_CONNECT_S: Final = 5.0
_CONNECTIONS: Final = 4096
_SENT: Final = "http11.send_request_body.complete"


@final
class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@final
class Events:
    """An answer that comes in pieces.

    Attributes:
        status: HTTP status.
        headers: HTTP headers.
    """

    def __init__(self, response: httpx.Response, who: str) -> None:
        self._response = response
        self._who = who
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def body(self) -> bytes:
        """All of it. Raises Refusal."""
        data = bytearray()
        async for piece in self.pieces():
            data += piece
            if len(data) > MOST_ANSWER:
                raise _broken(self._who, f"answered with more than {MOST_ANSWER} bytes")
        return bytes(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Bytes as they come. Raises Refusal."""
        try:
            async for piece in self._response.aiter_bytes():
                yield piece
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _unreachable(self._who, error) from error

    async def events(self) -> AsyncIterator[bytes]:
        """Data of server-sent events, one line each, without the last `[DONE]`. Raises Refusal, also at a cut."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.strip()
                if not data.startswith(b"data:"):
                    continue
                data = data.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield data
            if len(rest) > _MOST_EVENT:
                raise _broken(self._who, f"sent an event of more than {_MOST_EVENT} bytes")
        raise _broken(self._who, "ended its stream before it was done")


@final
class Transport:
    """Requests to other servers. Follows no redirect, uses no proxy: no host is contacted that was not configured."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=256),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )

    async def close(self) -> None:
        """End every connection."""
        await self._client.aclose()

    async def ask(
        self, url: str, *, who: str, within_s: float, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """GET, or POST of JSON, and the whole answer.

        Args:
            url: absolute.
            who: names the server in an error.
            within_s: for all of it.
            body: goes out as JSON; None: GET.
            headers: further ones.

        Raises:
            Refusal: 502, 503 or 504, where no answer came.
        """
        try:
            async with asyncio.timeout(within_s), self.open(url, who=who, body=body, headers=headers) as events:
                return Answer(events.status, events.headers, await events.body())
        except TimeoutError:
            reason = f"{who} has not answered within {within_s:.3g} s"
            raise Refusal(504, reason, code="TIMEOUT", retryable=True) from None

    @asynccontextmanager
    async def open(
        self,
        url: str,
        *,
        who: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[Events]:
        """As `ask`, for an answer in pieces; without a bound on time. Leaving the block ends the connection.

        Args:
            url: absolute.
            who: names the server in an error.
            body: goes out as JSON, bytes as they are; None: GET.
            headers: further ones.
            on_sent: called when the request is on its way as a whole.

        Raises:
            Refusal: no answer came.
        """

        async def trace(event: str, _info: Mapping[str, Any]) -> None:
            if event == _SENT and on_sent is not None:
                on_sent()

        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        more = {} if data is None else {"content-type": "application/json"}
        async with AsyncExitStack() as stack:
            try:
                request = self._client.stream(
                    "GET" if data is None else "POST",
                    url,
                    content=data,
                    headers={**more, **(headers or {})},
                    extensions={} if on_sent is None else {"trace": trace},
                )
                response = await stack.enter_async_context(request)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise _unreachable(who, error) from error
            yield Events(response, who)


def read_json(data: bytes, who: str) -> Any:
    """What a server sent. Raises Refusal when it is no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(who, f"sent what is no JSON: {error}") from error


def _unreachable(who: str, error: Exception) -> Refusal:
    kind = type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return Refusal(503, f"{who} cannot be reached ({kind}): is it running?", code="UNREACHABLE", retryable=True)
    return Refusal(502, f"the connection to {who} broke ({kind})", code="CONNECTION_LOST", retryable=True)


def _broken(who: str, what: str) -> Refusal:
    return Refusal(502, f"{who} {what}", code="BAD_UPSTREAM", retryable=True)
