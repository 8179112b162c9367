"""Answers one admitted request over HTTP, watches its client and its deadline, and ends it whichever goes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Final, final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdhandoff_tilert.node.job import Ending, Event, Job, Tokens
from pdhandoff_tilert.node.mailbox import Mailbox
from pdhandoff_tilert.node.output import Output, event
from pdhandoff_tilert.node.refusals import Refusal
from pdhandoff_tilert.node.service import Service

__all__ = ["Answer"]

_SEND_S: Final = 30.0
"a client that takes nothing for this long has gone"
_GONE: Final = 499
"the status that access logs give a request whose client has gone; it is never sent"
_EVENTS: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_DONE: Final = b"data: [DONE]\n\n"


@final
class Answer(Response):
    """An ASGI response. The status is only sent when the first token is there, so that a failure before has its own.

    Args:
        service: the node.
        job: admitted.
        mailbox: gets the job's events.
    """

    def __init__(self, service: Service, job: Job, mailbox: Mailbox) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._mailbox = mailbox
        self._output = Output(job.wanted, service.engine.model)
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or end the job when nobody listens."""
        del scope
        watch = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._job.wanted.stream else self._whole(send))
        except (OSError, TimeoutError):  # the client has gone, or takes nothing
            self._abort("DISCONNECTED", "the client has gone")
        finally:
            watch.cancel()
            self._abort("DISCONNECTED", "the answer was broken off")
            if self._job.ending is not None:
                self._service.note(self._job, self._job.ending)

    async def _watch(self, receive: Receive) -> None:
        """End the job when the client goes."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort("DISCONNECTED", "the client has gone")

    def _abort(self, code: str, reason: str) -> None:
        self._service.end(self._job, Ending(refusal=Refusal(_GONE, reason, code=code)))

    async def _events(self) -> AsyncIterator[tuple[list[int], Ending | None]]:
        """New tokens, and the end: everything that has gathered at a time."""
        while True:
            events = await self._next()
            tokens: list[int] = []
            ending: Ending | None = None
            for item in events:
                if isinstance(item, Tokens):
                    self._output.add(item)
                    tokens += item.tokens
                else:
                    ending = item
            yield tokens, ending
            if ending is not None:
                return

    async def _next(self) -> list[Event]:
        """Whatever comes next; when time is up, the end."""
        job = self._job
        left = job.admitted_s + job.wanted.deadline_s - self._service.clock()
        with suppress(TimeoutError):
            if left > 0:
                return await self._mailbox.take(left)
        reason = f"not done within {job.wanted.deadline_s:.3g} s, while {job.stage.value}"
        self._service.end(job, Ending(refusal=Refusal(504, reason, code="DEADLINE", retryable=True)))
        return await self._mailbox.take(_SEND_S)

    async def _whole(self, send: Send) -> None:
        ending = Ending()
        async for _, end in self._events():
            ending = end or ending
        if ending.refusal is not None:
            await self._refuse(send, ending.refusal)
        else:
            await self._send_all(send, 200, self._output.whole(ending), self._own_headers())

    async def _stream(self, send: Send) -> None:
        refusal: Refusal | None = None
        async for tokens, ending in self._events():
            refusal = None if ending is None else ending.refusal
            if refusal is not None and not self._begun and not tokens:
                await self._refuse(send, refusal)
                return
            if tokens or (ending is not None and refusal is None):
                await self._write(send, self._output.chunk(tokens, None if refusal is not None else ending))
        if refusal is not None and refusal.status == _GONE:
            return
        tail = self._output.last() if refusal is None else event(refusal.body())
        await self._write(send, tail + _DONE)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        """A piece of the stream, its head before the first one."""
        if not self._begun:
            self._begun = True
            headers = self._own_headers() | {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
            }
            await self._send(send, _start(200, headers))
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        if refusal.status != _GONE:  # nobody is there to be told
            body = msgspec.json.encode(refusal.body())
            await self._send_all(send, refusal.status, body, self._own_headers() | refusal.headers)

    async def _send_all(self, send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        whole = {**headers, "content-type": "application/json", "content-length": str(len(body))}
        await self._send(send, _start(status, whole))
        await self._send(send, {"type": "http.response.body", "body": body})

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(_SEND_S):
            await send(message)

    def _own_headers(self) -> dict[str, str]:
        job = self._job
        return {
            "x-request-id": job.wanted.request_id.encode("ascii", "replace").decode(),
            "x-pdhandoff-queue-position": str(job.position),
        }


def _start(status: int, headers: Mapping[str, str]) -> dict[str, object]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
