"""The router's HTTP face."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdhandoff_router.client import Client, Exchange, read_body
from pdhandoff_router.refusals import Refusal
from pdhandoff_router.router import Router
from pdhandoff_router.turn import MESSAGES, PATHS, Turn, upstream_headers

__all__ = ["make_app"]

_MOST_BODY: Final = 32 << 20
_MODELS_S: Final = 10.0


def make_app(router: Router) -> Starlette:
    """The application of a router."""
    pages = _Pages(router)
    return Starlette(
        routes=[
            *(Route(path, pages.answer, methods=["POST"]) for path in PATHS),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/health", pages.health, methods=["GET"]),
            Route("/status", pages.status, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            Route("/drain", pages.drain, methods=["POST"]),
        ],
        exception_handlers={Refusal: _refused, HTTPException: _http_error, Exception: _fault},
    )


@final
class _Pages:
    """One method for each path."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def answer(self, request: Request) -> Response:
        """A completion, in any of the formats."""
        router = self._router
        if router.draining:
            raise Refusal(503, "the router is draining: ask another one", code="DRAINING", retry_after_s=1)
        body = await read_body(request, _MOST_BODY)
        path = request.url.path
        if body.get("stream") not in (None, True, False):
            raise Refusal(400, "stream must be true or false", code="BAD_REQUEST", param="stream")
        headers = dict(request.headers)

        async def work(client: Client) -> None:
            router.present += 1
            try:
                await Turn(router, path, body, headers, client).run()
            finally:
                router.present -= 1

        return Exchange(work)

    async def models(self, request: Request) -> Response:
        """What the servers serve."""
        router = self._router
        group = router.prefills if router.prefills.members else router.natives
        with group.lease() as server:
            answer = await router.transport.ask(
                f"{server.url}/v1/models",
                who=f"the {group.kind} server {server.name}",
                within_s=_MODELS_S,
                headers=upstream_headers(dict(request.headers)),
            )
        return Response(answer.body, status_code=answer.status, media_type="application/json")

    async def health(self, _request: Request) -> Response:
        """200 while something can be answered, and 503 with the reason while nothing can."""
        problem = self._router.problem()
        if not problem:
            return _json({"status": "ok"})
        return _json({"status": "unavailable", "reason": problem}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def status(self, _request: Request) -> Response:
        """How everything stands."""
        return _json(self._router.show())

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self._router.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def drain(self, _request: Request) -> Response:
        """Take nothing new."""
        self._router.draining = True
        return _json({"state": "draining", "requests": self._router.present}, HTTPStatus.ACCEPTED)


def _json(content: object, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, Refusal) else Refusal(500, str(error), code="INTERNAL")
    response = _json(refusal.anthropic() if request.url.path == MESSAGES else refusal.openai(), refusal.status)
    response.headers.update(refusal.headers)
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason = f"{request.method} {request.url.path[:256]}: {HTTPStatus(status).phrase}"
    return await _refused(request, Refusal(status, reason, code=HTTPStatus(status).name))


async def _fault(request: Request, error: Exception) -> Response:
    """Starlette logs the fault and raises it again after this."""
    return await _refused(request, Refusal(500, f"fault in the router: {type(error).__name__}", code="INTERNAL"))
