"""The node's HTTP face."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pdhandoff_tilert.node.answer import Answer
from pdhandoff_tilert.node.mailbox import Mailbox
from pdhandoff_tilert.node.refusals import Refusal, bad_request
from pdhandoff_tilert.node.service import Service
from pdhandoff_tilert.node.status import node_status

__all__ = ["BODY_S", "make_app", "read_body"]

Handler = Callable[[Request], Awaitable[Response]]

BODY_S: Final = 30.0
"how long a client may take to send its body"
_ABORT_BYTES: Final = 1 << 20
_MOST_ABORTS: Final = 4096


class _Abort(msgspec.Struct, frozen=True, kw_only=True):
    request_ids: list[str] | str


def make_app(service: Service, *, api_key: bytes | None = None) -> Starlette:
    """The application.

    Args:
        service: the node.
        api_key: what `Authorization: Bearer` must carry, on everything but /health and /metrics. None: nothing.
    """
    pages = _Pages(service)
    guard = _Guard(api_key)
    guarded = (
        ("/inference/v1/generate", pages.generate, "POST"),
        ("/inference/v1/abort_requests", pages.abort, "POST"),
        ("/drain", pages.drain, "POST"),
        ("/v1/models", pages.models, "GET"),
        ("/status", pages.status, "GET"),
    )
    return Starlette(
        routes=[
            *(Route(path, guard.before(handler), methods=[method]) for path, handler, method in guarded),
            Route("/health", pages.health, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
        ],
        exception_handlers={Refusal: _refused, HTTPException: _http_error, Exception: _fault},
    )


@final
class _Guard:
    """Lets requests with the right key pass."""

    def __init__(self, api_key: bytes | None) -> None:
        self._expected = None if api_key is None else b"Bearer " + api_key

    def before(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1", "replace")
            if self._expected is not None and not hmac.compare_digest(given, self._expected):
                reason = "the API key is missing or wrong: send Authorization: Bearer KEY"
                raise Refusal(401, reason, code="API_KEY")
            return await handler(request)

        return checked


@final
class _Pages:
    """One method for each path."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, request: Request) -> Response:
        """Tokens in, tokens out."""
        service = self._service
        try:
            data = await read_body(request, service.body_limit)
            wanted = service.read(data, request.headers.get("x-request-id"))
            mailbox = Mailbox()
            return Answer(service, service.submit(wanted, mailbox.put), mailbox)
        except Refusal as refusal:
            service.metrics.refused(refusal.status, refusal.code)
            raise

    async def abort(self, request: Request) -> Response:
        """End requests by their ids."""
        try:
            wanted = msgspec.json.decode(await read_body(request, _ABORT_BYTES), type=_Abort).request_ids
        except (msgspec.MsgspecError, RecursionError) as error:
            raise bad_request("request_ids", f"the body needs request_ids, a list of strings: {error}") from error
        ids = [wanted] if isinstance(wanted, str) else wanted
        if len(ids) > _MOST_ABORTS:
            raise bad_request("request_ids", f"{len(ids)} ids: abort at most {_MOST_ABORTS} at a time")
        return _json({"aborted": self._service.abort(frozenset(ids))})

    async def drain(self, _request: Request) -> Response:
        """Take nothing new."""
        self._service.drain()
        return _json({"state": "draining", "requests": len(self._service.line.jobs())}, HTTPStatus.ACCEPTED)

    async def models(self, _request: Request) -> Response:
        """The one model."""
        engine = self._service.engine
        card = {"id": engine.model, "object": "model", "owned_by": "pdhandoff", "max_model_len": engine.max_seq_len}
        return _json({"object": "list", "data": [card]})

    async def status(self, _request: Request) -> Response:
        """How the node stands."""
        return _json(await asyncio.to_thread(node_status, self._service))

    async def health(self, _request: Request) -> Response:
        """200 while requests are taken, and 503 with the reason while not."""
        problem = await asyncio.to_thread(self._service.problem)
        if not problem:
            return _json({"status": "ok"})
        state = "draining" if problem == "draining" else "unhealthy"
        return _json({"status": state, "reason": problem}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        text = await asyncio.to_thread(self._service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def read_body(request: Request, most: int) -> bytes:
    """The body, in bounded size and time. Raises Refusal."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise Refusal(413, f"the body has more than {most} bytes", code="BODY_TOO_LARGE")
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_S:.0f} s", code="BODY_TIMEOUT") from None
    except ClientDisconnect:
        raise Refusal(400, "the client left while it sent the body", code="DISCONNECTED") from None
    return bytes(data)


def _json(content: object, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


async def _refused(_request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, Refusal) else Refusal(500, str(error), code="INTERNAL")
    response = _json(refusal.body(), refusal.status)
    response.headers.update(refusal.headers)
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason = f"{request.method} {request.url.path[:256]}: {HTTPStatus(status).phrase}"
    return await _refused(request, Refusal(status, reason, code=HTTPStatus(status).name))


async def _fault(request: Request, error: Exception) -> Response:
    """Starlette logs the fault and raises it again after this."""
    return await _refused(request, Refusal(500, f"fault in the decode node: {type(error).__name__}", code="INTERNAL"))
